"""The house rules that a reader cannot check by eye: size, import order, imports without side effects, short functions,
explicit encodings.
"""

import ast
import graphlib
import io
import subprocess
import sys
import tokenize
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "specsel"
MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in PACKAGE.rglob("*.py")
}
FLOORS = (  # a module may import what stands on the lines above its own, and its own folder
    ("logs", "stats"),
    ("costs",),
    ("replay", "paper"),
    ("policies", "selection"),
    ("study",),
    ("engine",),
    ("doctor", "cli_engine"),
    ("cli",),
)
LARGEST_PACKAGE, LARGEST_MODULE = 8_250, 300  # code lines: no blanks, comments, docstrings
LONGEST, TYPICAL = 60, 8  # lines of a function without its docstring: the limit, and the median to keep
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def part(module: str) -> str:
    """The folder of a module, or its own name where it stands alone; "" for the package itself."""
    return (module.split(".") + [""])[1]


def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text("utf-8"))


def imported(module: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in it but for its types."""
    found, body = set(), tree(module)
    conditions = [n for n in ast.walk(body) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    types = {id(inner) for condition in conditions for inner in ast.walk(condition)}
    for node in ast.walk(body):
        if isinstance(node, ast.ImportFrom) and id(node) not in types and (node.module or "").startswith("specsel"):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= inner or {node.module}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "specsel"}
    return found - {"specsel", module}


def code_lines(path: Path) -> int:
    source, documented = path.read_text("utf-8"), set()
    owners = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, owners) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = (t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in LAYOUT)
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - documented)


def functions(module: str) -> list[tuple[str, int]]:
    """Name and length, without the docstring, of every function of a module."""
    found = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            found.append((f"{module}.{node.name}", body[-1].end_lineno - body[0].lineno + 1 if body else 0))
    return found


def test_the_package_is_thin():
    sizes = {module: code_lines(path) for module, path in MODULES.items()}
    assert sum(sizes.values()) <= LARGEST_PACKAGE
    assert {m: n for m, n in sizes.items() if n > LARGEST_MODULE} == {}


def test_every_folder_has_its_floor_and_imports_lead_down_only():
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    assert {part(m) for m in MODULES} - {""} == set(floor)
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imported(module)
        if part(other) != part(module) and part(module) and floor[part(other)] >= floor[part(module)]
    ]
    lazily = [w for w in wrong if w.startswith(("specsel.cli_engine", "specsel.doctor")) and "engine" in w]
    assert set(wrong) == set(lazily)


def test_no_imports_go_in_a_circle():
    graph = {m: imported(m) - {f"specsel.{part(m)}"} for m in MODULES if MODULES[m].name != "__init__.py"}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_analysis_imports_without_torch():
    """With torch made impossible to find, every module outside the engine still loads, and none asks for it."""
    names = [m for m in MODULES if part(m) != "engine"]
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
    names = [m for m in MODULES if part(m) not in ("engine", "cli", "cli_engine") and not m.endswith("sphinxext")]
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
    every = [entry for module in MODULES for entry in functions(module)]
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
