"""One file per family, each read like its paper."""
