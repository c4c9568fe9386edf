"""Set-up and supervision of a tritonserver."""
