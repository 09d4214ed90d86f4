"""Everything that knows TorchTitan: the loader, TOML configs, training, the CPU device."""
