"""The shape of the package: imports run one way, files stay short, and nothing is imported that is not declared."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "nwflow").rglob("*.py"))
OPTIONAL = ("accelerate", "diffusers", "ot", "tensorboard", "torchdiffeq", "transformers")


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def third_party_imports(path: Path) -> set[str]:
    """Top-level names of the packages that a file imports anywhere, the standard library and nwflow left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"nwflow"}


def test_imports_run_one_way() -> None:
    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None)
    assert status == EXIT_STATUS_SUCCESS, "an import points upwards, or a module stands in no layer: see the output"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_files_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"{path.name} has {lines} lines; a file that outgrows 400 holds more than one thing"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_third_party_imports_are_declared(path: Path) -> None:
    declared = {normalised(re.split(r"[\s\[<>=!~;]", line)[0]) for line in requires("nwflow") or []}
    distributions = packages_distributions()
    for name in third_party_imports(path):
        providers = {normalised(d) for d in distributions.get(name, [name])}
        assert providers & declared, f"{path.name} imports {name}, which pyproject.toml does not declare"


def test_import_loads_no_optional_package() -> None:
    code = f"import sys, nwflow; print(*[name for name in {OPTIONAL} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert loaded.stdout.split() == []
