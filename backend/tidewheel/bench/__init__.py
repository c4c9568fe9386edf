"""`tidewheel bench`: the same requests to any number of targets, measured by the client, in one report."""
