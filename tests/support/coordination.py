"""The store of JAX's coordination service, in memory: what another process wrote can be put in."""


class Store(dict):
    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self
        self[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.items() if key.startswith(f"{prefix.rstrip('/')}/")]

    def key_value_delete(self, key):
        del self[key]
