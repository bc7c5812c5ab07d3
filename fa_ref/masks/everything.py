"""Everything: no restriction; the identity of &. Encoder keys and cached prefixes are seen like this."""

import torch

from fa_ref.masks.mask import Mask

everything = Mask(lambda q_pos, k_pos: torch.ones_like(q_pos + k_pos, dtype=torch.bool), "everything")
