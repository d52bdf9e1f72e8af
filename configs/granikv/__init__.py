"""Tables and figures of the GraniKV paper, one file each; run them with ``experiments.tables``."""
