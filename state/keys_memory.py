"""API keys in memory, for tests and for trying things out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from taskline.state.keys import ApiKey


class MemoryKeys:
    """A `KeyStore` for one process."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        """Begin with these keys."""
        self._keys = {key.prefix: key for key in keys}

    async def find(self, prefix: str) -> ApiKey | None:
        """As `KeyReader.find`."""
        return self._keys.get(prefix)

    async def add(self, key: ApiKey) -> bool:
        """As `KeyStore.add`."""
        return self._keys.setdefault(key.prefix, key) is key

    async def revoke(self, prefix: str, at_ms: int) -> ApiKey | None:
        """As `KeyStore.revoke`."""
        key = self._keys.get(prefix)
        if key is not None and key.revoked_at is None:
            key = self._keys[prefix] = replace(key, revoked_at=at_ms)
        return key

    async def keys(self) -> Sequence[ApiKey]:
        """As `KeyStore.keys`."""
        return sorted(self._keys.values(), key=lambda key: (key.created_at, key.prefix))
