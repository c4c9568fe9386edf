"""Finding, assembling, starting and watching a tritonserver."""
