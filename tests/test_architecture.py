"""The house rules that a reader cannot check by eye: import order, imports without side effects, short functions,
explicit encodings.
"""

import ast
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

PACKAGE = Path(__file__).parent.parent / "specsel"
ORDER = (
    "records",
    "columns",
    "log",
    "importers",
    "statistics",
    "decisions",
    "policies",
    "contextual",
    "streams",
    "replay",
    "catalogue",
    "tuning",
    "curves",
    "redraft",
    "breakeven",
    "logistic",
    "selector",
    "routing",
    "diagnostics",
    "drafters",
    "simulation",
    "claims",
    "headline",
    "coverage",
    "overview",
    "tables",
    "verdicts",
    "why",
    "quality",
    "charts",
    "staging",
    "pages",
    "book",
    "release",
    "sphinxext",
    "doctor",
    "engine_cli",
    "cli",
)
ENGINE_MAY_IMPORT = {"log", "policies", "replay", "logistic"}
LONGEST, TYPICAL = 60, 8  # lines of a function without its docstring: the limit, and the median to keep


def modules() -> list[Path]:
    return sorted(PACKAGE.glob("*.py"))


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "specsel":
            _, _, inner = node.module.partition(".")
            found |= {inner.partition(".")[0]} if inner else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("specsel.")}
    return found - {"__version__"}


def functions(path: Path) -> list[tuple[str, int]]:
    """Name and length, without the docstring, of every function of a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            found.append((f"{path.stem}.{node.name}", body[-1].end_lineno - body[0].lineno + 1 if body else 0))
    return found


def test_every_module_has_its_place_in_the_order():
    assert {path.stem for path in modules()} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_modules_import_only_modules_above_them(name):
    """The engine is the one exception: the commands that need it import it when they run."""
    above = set(ORDER[: ORDER.index(name)]) | ({"engine"} if name in ("engine_cli", "doctor") else set())
    assert imported(PACKAGE / f"{name}.py") <= above


def test_the_engine_imports_records_policies_and_the_selector_only():
    for path in sorted((PACKAGE / "engine").glob("*.py")):
        assert imported(path) <= ENGINE_MAY_IMPORT | {"engine"}, path.name


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_analysis_imports_without_torch():
    """With torch made impossible to find, every module outside the engine still loads, and none asks for it."""
    names = [f"specsel.{name}" for name in ORDER]
    run(f"""
import importlib, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTorch())
[importlib.import_module(n) for n in {names}]
assert "torch" not in sys.modules and "specsel.engine" not in sys.modules
""")


def test_import_has_no_side_effects():
    """No seed, no log level, no chart theme, no warning filter, no file: importing everything changes nothing that
    others see.
    """
    names = [f"specsel.{name}" for name in ORDER if name not in ("sphinxext", "cli", "engine_cli")]
    run(f"""
import importlib, logging, os, random, sys, warnings
import altair, numpy, pandas, scipy.stats, sklearn.pipeline
def state():
    root = logging.getLogger()
    return (str(numpy.random.get_state()), random.getstate(), root.level, len(root.handlers),
            altair.renderers.active, altair.theme.active, dict(os.environ), sorted(os.listdir(".")), numpy.geterr())
before = state()
[importlib.import_module(n) for n in {names}]
assert state() == before
""")


def test_the_root_package_loads_nothing():
    assert (
        run("import sys, specsel; print(sum(m.startswith(('numpy', 'specsel.')) for m in sys.modules))").strip() == "0"
    )


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    run(
        "import specsel\n"
        "try: specsel.no_such_name\n"
        "except AttributeError as error: assert 'no_such_name' in str(error)\n"
        "else: raise SystemExit(1)"
    )


def test_functions_stay_short():
    """None longer than a screen, and half of them no longer than a paragraph."""
    every = [entry for path in [*modules(), *sorted((PACKAGE / "engine").glob("*.py"))] for entry in functions(path)]
    assert [entry for entry in every if entry[1] > LONGEST] == []
    assert median(length for _, length in every) <= TYPICAL


def test_the_global_random_generator_is_never_used():
    """Randomness is an argument: numpy's legacy functions and seeds do not occur."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("np.random", "numpy.random"):
                assert node.attr in ("default_rng", "Generator", "SeedSequence", "PCG64", "Philox"), (
                    f"{path.name}: {ast.unparse(node)}"
                )


def test_text_files_are_opened_with_an_encoding():
    """Machines differ in their default; a file must not."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = {keyword.arg for keyword in node.keywords} | (
                {"encoding"} if name == "read_text" and node.args else set()
            )
            binary = any(
                isinstance(arg, ast.Constant) and isinstance(arg.value, str) and "b" in arg.value
                for arg in node.args[1:]
            )
            if name in ("read_text", "write_text") or (
                name == "open" and isinstance(node.func, ast.Name) and not binary
            ):
                found += [] if "encoding" in given else [f"{path.name}, line {node.lineno}: {ast.unparse(node)[:60]}"]
    assert found == []
