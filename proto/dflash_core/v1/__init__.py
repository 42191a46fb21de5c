"""Generated schema of package `dflash.core.v1`; `make proto` regenerates it."""
