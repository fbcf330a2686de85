"""Makes `python3 -I /usr/lib/unbounded-agent` start the machine half.

Isolated mode (-I) ignores PYTHONPATH and the current directory, but puts a directory that it runs on the path.
"""

from agent.inside.__main__ import main

raise SystemExit(main())
