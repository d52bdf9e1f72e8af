"""One file per demo, paper table or figure; each has a ``get_config()``."""
