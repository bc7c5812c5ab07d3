"""Who owns which page. Pages are only numbers here: their keys and values lie in the backend's pool.

Two requests that start with the same tokens need the same keys and values there, so they may own the same
pages. A full page is found by all the tokens up to its end: a key depends on everything before it.
"""

from collections import Counter


class PageCache:
    """
    cache = PageCache(pages=8, page_size=4)
    a = cache.alloc(3)                                  # one owner each
    cache.publish(prompt, a, start=0, end=9)            # its two full pages can be found
    b = cache.match(prompt)                             # the same two pages, now with two owners each
    """

    def __init__(self, *, pages: int, page_size: int, share: bool = True):
        self.page_size, self.share = page_size, share
        self.free = list(range(pages, 0, -1))  # page 0 is the padding page, never handed out
        self.owners: Counter[int] = Counter()
        self.page_of: dict[tuple[int, ...], int] = {}  # tokens up to the end of a full page -> that page
        self.prefix_of: dict[int, tuple[int, ...]] = {}  # the inverse
        self.peak = self.freed = 0

    @property
    def used(self) -> int:
        return len(self.owners)

    def alloc(self, count: int) -> list[int] | None:
        """`count` pages, or None and no change when fewer are free."""
        if count > len(self.free):
            return None
        pages = [self.free.pop() for _ in range(count)]
        self.owners.update(pages)
        self.peak = max(self.peak, self.used)
        return pages

    def match(self, tokens: list[int]) -> list[int]:
        """Leading full pages that exist already; the caller becomes an owner. The last token is never in one:
        somebody has to compute it, or there would be no logits to continue from."""
        pages: list[int] = []
        for end in range(self.page_size, len(tokens), self.page_size):
            page = self.page_of.get(tuple(tokens[:end]))
            if page is None:
                break
            pages.append(page)
        self.owners.update(pages)
        return pages

    def publish(self, tokens: list[int], pages: list[int], *, start: int, end: int) -> None:
        """Make the pages that become full between token `start` and token `end` findable."""
        for i in range(start // self.page_size, end // self.page_size) if self.share else ():
            prefix = tuple(tokens[: (i + 1) * self.page_size])
            if prefix not in self.page_of:
                self.page_of[prefix], self.prefix_of[pages[i]] = pages[i], prefix

    def release(self, pages: list[int]) -> None:
        """One owner less each; a page without owners is forgotten and free."""
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                del self.owners[page]
                if page in self.prefix_of:
                    del self.page_of[self.prefix_of.pop(page)]
                self.free.append(page)
                self.freed += 1
