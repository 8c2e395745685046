"""Who may import whom: read from the sources, then tried in fresh processes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import run_python

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {"engine": {"spark_server"}, "kernels": {"spark_server", "engine"}}
# What `engine` imports when it is loaded; anything else (transformers ...) only inside functions.
ENGINE_CORE = {"torch", "numpy", "safetensors", "psutil", "engine", "kernels"}
# Modules of the API process; they must start fast and never hold tensors.
API_MODULES = [
    "spark_server.api.app",
    "spark_server.cli",
    "spark_server.engine_client",
    "spark_server.server",
    "spark_server.settings",
    "spark_server.text.model",
]
HEAVY = ["torch", "xgrammar", "numba", "triton"]
# Packages that a machine with a card may lack: the engine's core must do without them.
BLOCKED = [
    "fastapi",
    "pydantic",
    "msgspec",
    "zmq",
    "numba",
    "transformers",
    "huggingface_hub",
    "xgrammar",
]
DEVELOPMENT = ["pytest", "hypothesis", "openai", "matplotlib", "mypy"]
BLOCKER = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}))\n"


def modules(package: str) -> Iterator[Path]:
    yield from sorted((ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of everything that is imported anywhere below `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def imported_at_load(body: list[ast.stmt]) -> Iterator[str]:
    """Like `imported`, but only what runs at import: no functions, no TYPE_CHECKING blocks."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported_at_load(node.orelse)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        else:
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from imported_at_load(getattr(node, field, []))


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_lower_packages_never_import_higher_ones(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(package)
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
        if name in FORBIDDEN[package]
    ]
    assert not wrong


def test_the_engine_loads_only_tensors_and_the_standard_library() -> None:
    allowed = ENGINE_CORE | sys.stdlib_module_names
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules("engine")
        for name in imported_at_load(ast.parse(path.read_text(encoding="utf-8")).body)
        if name not in allowed
    ]
    assert not wrong


def test_triton_is_imported_only_by_triton_modules() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for package in ("engine", "kernels", "spark_server")
        for path in modules(package)
        if not path.name.startswith("triton")
        and "triton" in imported_at_load(ast.parse(path.read_text(encoding="utf-8")).body)
    ]
    assert not wrong


def test_the_kernels_package_is_no_look_alike_of_another_distribution() -> None:
    """transformers probes a module named `kernels` for its version; ours must offer none."""
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text(encoding="utf-8"))
    assert not list(imported(tree))
    assert "__version__" not in ast.dump(tree)


def test_nothing_loads_a_development_package() -> None:
    """The base install must be enough to serve, plan, chat and bench."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in ("spark_server", "engine", "kernels", "benchmarks")
        for path in modules(package)
        for name in imported_at_load(ast.parse(path.read_text(encoding="utf-8")).body)
        if name in DEVELOPMENT
    ]
    assert not wrong


@pytest.mark.parametrize("module", API_MODULES)
def test_the_api_process_holds_no_tensors(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run_python(code, tmp_path).strip() == "[]"


def test_every_engine_module_loads_without_the_server_packages(tmp_path: Path) -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in modules("engine")
    ]
    load = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\nprint('ok')"
    assert run_python(BLOCKER + load, tmp_path).strip() == "ok"


def test_every_triton_module_loads_without_the_server_packages(tmp_path: Path) -> None:
    """Only the CPU's forms need numba; a machine with a card may lack it."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in modules("kernels")
        if path.stem not in ("cpu", "jit")
        and "numba" not in imported_at_load(ast.parse(path.read_text(encoding="utf-8")).body)
        and "kernels.jit" not in path.read_text(encoding="utf-8")
    ]
    assert {"kernels.gdn.triton", "kernels.attention.triton", "kernels.moe.triton"} <= set(names)
    load = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
    choose = (
        "import torch, kernels.ops\nkernels.ops.triton_ops(torch.bfloat16, batch_invariant=True)"
    )
    assert run_python(f"{BLOCKER}{load}{choose}\nprint('ok')", tmp_path).strip() == "ok"


DECODE = """
import sys
from pathlib import Path
import torch
from engine.build import build_engine
from engine.config import EngineConfig
from engine.request import GenerationRequest, SamplingParams
torch.set_num_threads(1)
config = EngineConfig(
    model_dir=sys.argv[1], max_batch_size=2, max_seq_len=256, max_prefill_tokens=64,
    memory_budget=2**30, threads=1, kernels="naive",
)
core = build_engine(config, lambda *args: None).core
sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
core.add(GenerationRequest(1, tuple(range(70)), sampling))
tokens = []
while core.has_work():
    tokens += [token for delta in core.step() for token in delta.token_ids]
print(len(tokens))
"""


def test_the_engine_decodes_without_the_server_packages(tmp_path: Path) -> None:
    model = ROOT / "spark_server" / "assets" / "spark-tiny"
    code = f"{BLOCKER}sys.argv = ['test', {str(model)!r}]{DECODE}"
    assert run_python(code, tmp_path).strip() == "3"
