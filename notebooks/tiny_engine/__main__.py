from tiny_engine.demo import main

raise SystemExit(main())
