"""The real scheduler and KV cache under a modelled clock: what a deployment would do, before there is one."""
