"""The tool of ``doubling_taskset``, served by a process that the package starts."""

from __future__ import annotations

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.mcp import SharedToolsetConfig  # pyright: ignore[reportMissingImports]


class DoublingTools(vf.Toolset[SharedToolsetConfig, vf.State]):
    @vf.tool
    async def double(self, number: int) -> str:
        """Double a number."""
        return str(2 * number)


if __name__ == "__main__":
    DoublingTools.run()
