"""What people run on Triton without an engine for language models: the measure of this one."""
