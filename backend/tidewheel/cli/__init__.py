"""The command `tidewheel`."""
