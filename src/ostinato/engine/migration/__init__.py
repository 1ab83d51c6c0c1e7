"""Migration of running requests: exported by one engine, imported by another one of the same plan."""
