"""The notebooks: what a reader may rely on in their sources, and that they run on a small log with small parameters."""

import ast
import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

import specsel
from specsel.logs import write_log
from specsel.paper import notebooks
from specsel.paper.build import (
    build_book,
    check_logs,
    check_target,
    kernel_environment,
    list_notebooks,
    only_build,
    replace_folder,
    run_notebook,
    run_notebooks,
    stop_kernels,
)
from specsel.study.simulation import Model, simulate_positions

ROOT = Path(__file__).parent.parent
CASES = Path(__file__).parent / "cases"
NOTEBOOKS = list_notebooks(ROOT)


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in notebooks.read_notebook(path)["cells"] if cell["cell_type"] == kind]


def simulated(folder: Path, seed: int = 0, **manifest) -> Path:
    """A run folder of 24 short requests."""
    model = Model(requests_per_workload=6, output_len=(20, 40), passage=((1.0, -0.5, 0.2, 0.8), (-1.2, 0.5, 0.2, -1.0)))
    log = replace(simulate_positions(model, rng=np.random.default_rng(seed)), run=folder.name)
    return write_log(folder, log, manifest)


def foreign_log(folder: Path) -> Path:
    """A run folder of another pool: other arms and workloads, colons in names, one context field, no confidences."""
    arms, workloads = ("suffix:tree", "medusa_head", "draft_70m"), ("sql:read", "support")
    ranks = {"logit": ((0.9, 0.2, -0.5), (-0.5, 0.6, 0.3)), "passage": ((0.5, -0.5, 0.2), (-0.9, 0.5, 0.2))}
    sizes = {"requests_per_workload": 12, "output_len": (20, 40), "draft_len": 5, "no_draft": (0.3, 0.0, 0.0)}
    model = Model(arms=arms, workloads=workloads, silent=arms, **ranks, **sizes)
    log = simulate_positions(model, rng=np.random.default_rng(3))
    return write_log(folder, replace(log, run="mine", context={"match_length": log.context["match_length"]}))


def notebook(folder: Path, *sources: str, tagged: bool = True, **metadata) -> Path:
    """A small notebook; its first cell holds the parameters."""
    made = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for i, source in enumerate(sources)
    ]
    if tagged:
        made[0]["metadata"] = {"tags": ["parameters"]}
    path = folder / "small.ipynb"
    path.write_text(
        json.dumps({"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8"
    )
    return path


# ---- sources


def test_all_notebooks_are_in_the_table_of_contents():
    assert sorted(NOTEBOOKS) == sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_code_cell_holds_typed_parameters(path):
    """papermill lists parameters with their types only where they are annotated; the run is one of them and has its
    default.
    """
    first = next(cell for cell in notebooks.read_notebook(path)["cells"] if cell["cell_type"] == "code")
    assert first["metadata"]["tags"] == ["parameters"]
    assert all(isinstance(node, ast.AnnAssign) for node in ast.parse("".join(first["source"])).body)
    assert notebooks.notebook_parameters(path)["run"] == "data/runs/campaign"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_ask_a_question_and_say_what_would_change_our_mind(path):
    prose = cells(path, "markdown")
    assert re.match(r"# [^\n]+\?\n", prose[0])
    assert "**What would change our mind.**" in prose[-1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_clean(path):
    """No times, ids that change, counters, widget state or paths of a machine; any machine has the kernel."""
    stored = notebooks.read_notebook(path)
    assert stored == notebooks.clean_notebook(stored, path.stem, for_book=False)
    assert not notebooks.LOCAL_PATH.search(path.read_text("utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_paths_of_the_defaults_are_found_from_any_folder(path):
    """Every parameter whose default leads to something of the project goes through `specsel.located`."""
    source = "\n".join(cells(path, "code"))
    defaults = notebooks.notebook_parameters(path)
    paths = [name for name, value in defaults.items() if isinstance(value, str) and (ROOT / value).exists()]
    opened = {"run"} if "specsel.open_chapter(" in source else set()
    for name in {*paths} - opened:
        assert re.search(rf"specsel\.located\((chapter\.)?{name}\)", source), name


def test_a_path_is_looked_up_here_first_and_then_in_the_project(tmp_path, monkeypatch):
    for folder in (ROOT / "notebooks", Path("/"), tmp_path):
        monkeypatch.chdir(folder)
        assert specsel.located("data/runs/campaign") == ROOT / "data/runs/campaign"
        assert specsel.located("data/runs/nosuch") == Path("data/runs/nosuch")
    (tmp_path / "data/runs/campaign").mkdir(parents=True)
    assert specsel.located("data/runs/campaign") == Path("data/runs/campaign")


# ---- parameters


def test_known_parameters_are_accepted_and_unknown_ones_refused_by_name():
    """The misspelt file names both of its mistakes, and the right spelling of the nearer one."""
    good, typo = (yaml.safe_load((CASES / f"params_{which}.yaml").read_text("utf-8")) for which in ("good", "typo"))
    rename = {"log_path": "run", "n_boot": "n_resamples"}
    notebooks.check_parameters(NOTEBOOKS, {rename.get(k, k): v for k, v in good.items() if k != "arms"})
    with pytest.raises(notebooks.BookError, match="'seeed', 'n_boots'; did you mean seed"):
        notebooks.check_parameters(NOTEBOOKS, {rename.get(k, k): v for k, v in typo.items()})


def test_a_notebook_without_the_parameters_tag_is_refused(tmp_path):
    path = notebook(tmp_path, "run: str = 'x'\nseed: int = 7", tagged=False)
    with pytest.raises(notebooks.BookError, match="small.ipynb: no cell has the tag 'parameters'"):
        notebooks.check_parameters([path], {"run": "y"})


@pytest.mark.parametrize("damage", ["delete", "change one byte", "cut"])
def test_a_damaged_log_stops_the_book_before_anything_runs(tmp_path, damage):
    """The sentence names the file, and no notebook was started."""
    run = simulated(tmp_path / "run")
    victim = run / "blocks_code.jsonl.gz"
    data = bytearray(victim.read_bytes())
    if damage == "delete":
        victim.unlink()
    else:
        data[len(data) // 2] ^= 1
        victim.write_bytes(bytes(data) if damage != "cut" else bytes(data[: len(data) // 2]))
    with pytest.raises(notebooks.BookError, match="blocks_code.jsonl.gz"):
        build_book(run, root=ROOT, work=tmp_path / "work", say=lambda line: None)
    assert not (tmp_path / "work").exists()


def test_a_damaged_run_beside_the_run_stops_the_book_as_well(tmp_path):
    """Found by the ending that a notebook's parameter names; the run itself is whole."""
    run, beside = simulated(tmp_path / "run"), simulated(tmp_path / "run_t07")
    check_logs(ROOT, NOTEBOOKS, {"run": str(run)}, lambda line: None)
    (beside / "blocks_code.jsonl.gz").unlink()
    with pytest.raises(notebooks.BookError, match="run_t07/blocks_code.jsonl.gz(.|\n)*02_sweep.ipynb"):
        check_logs(ROOT, NOTEBOOKS, {"run": str(run)}, lambda line: None)


def test_a_log_of_block_starts_only_is_refused_with_a_reason():
    with pytest.raises(notebooks.BookError, match="block-anchored"):
        check_logs(ROOT, NOTEBOOKS[:1], {"run": str(CASES / "anchored_only.jsonl")}, lambda line: None)


def test_a_second_build_in_the_same_folder_is_refused(tmp_path):
    """Two builds would mix their results; the second says so and leaves the first alone."""
    with only_build(tmp_path), pytest.raises(notebooks.BookError, match="another build is running"):
        with only_build(tmp_path):
            pass
    with only_build(tmp_path):
        pass


# ---- where pages may go


def test_a_folder_that_was_not_made_here_is_refused_before_anything_runs(tmp_path):
    """Also by a link; new and empty folders, and pages of an earlier build, are replaced whole."""
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x", encoding="utf-8")
    link.symlink_to(mine)
    for place in (mine, link, mine / "thesis.txt"):
        with pytest.raises(notebooks.BookError, match="holds something that this command did not make"):
            build_book(CASES / "golden_small.jsonl", root=ROOT, output=place, work=tmp_path / "work")
    assert (mine / "thesis.txt").read_text("utf-8") == "x" and not (tmp_path / "work").exists()


def test_pages_replace_pages_and_nothing_beside_them(tmp_path):
    made, beside = tmp_path / "made", tmp_path / "pages.new"
    for folder in (made, beside, tmp_path / "pages"):
        folder.mkdir()
    for text in ("first", "second"):
        check_target(tmp_path / "pages")
        (made / "index.html").write_text(text, encoding="utf-8")
        replace_folder(made, tmp_path / "pages")
        assert (tmp_path / "pages/index.html").read_text("utf-8") == text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "pages", "pages.new"]


def test_an_interrupted_build_ends_its_kernels_at_once(tmp_path):
    """Ctrl-C, or a cell that fails, does not wait for the cells of other notebooks."""
    path = notebook(tmp_path, "run: str = 'x'\nseed: int = 7", "import time; time.sleep(300)")
    failures = []

    def build():
        try:
            run_notebook(path, tmp_path / "out.ipynb", {}, ROOT)
        except Exception as error:
            failures.append(error)

    with kernel_environment(tmp_path / "work"):
        running = threading.Thread(target=build, daemon=True)
        running.start()
        started = time.monotonic()
        while running.is_alive() and time.monotonic() - started < 30:
            time.sleep(0.5)
            stop_kernels()
        running.join(5)
    assert "died" in str(failures[0]) and not running.is_alive()


@pytest.mark.slow
def test_a_failing_cell_ends_the_other_notebooks_at_once(tmp_path, monkeypatch):
    """Whatever their order, and also the one that starts just then."""
    monkeypatch.setattr("specsel.paper.build.AT_ONCE", 2)
    chapters = []
    for name, source in (("slow", "import time; time.sleep(300)"), ("bad", "raise RuntimeError('on purpose')")):
        made = notebook(tmp_path, "run: str = 'x'\nseed: int = 7", source)
        chapters.append(made.rename(tmp_path / f"{name}.ipynb"))
    started = time.monotonic()
    with pytest.raises(notebooks.BuildFailed, match="bad.ipynb, cell 1: RuntimeError: on purpose"):
        run_notebooks(tmp_path, tmp_path / "work", [*chapters, chapters[0]], {}, lambda line: None)
    assert time.monotonic() - started < 100


# ---- what an executed notebook may contain


def executed(*outputs) -> dict:
    return {"cells": [{"cell_type": "code", "metadata": {}, "source": "x", "outputs": list(outputs)}]}


CHART = {"output_type": "display_data", "metadata": {}, "data": {"application/vnd.vegalite.v6+json": {}}}


@pytest.mark.parametrize(
    ("output", "claims", "words"),
    [
        ({"output_type": "error", "ename": "RuntimeError", "evalue": "on purpose", "traceback": []}, 3, "RuntimeError"),
        ({"output_type": "stream", "name": "stdout", "text": ["skipped: no such file\n"]}, 3, "prints 'skipped"),
        ({"output_type": "display_data", "metadata": {}, "data": {"text/plain": "/root/x"}}, 3, "path of this machine"),
        (CHART, 0, "no claim"),
    ],
)
def test_a_page_that_would_mislead_is_not_built(output, claims, words):
    """An error, a swallowed failure that only prints, a path of the machine, a notebook that published nothing."""
    with pytest.raises(notebooks.BuildFailed, match=f"x.ipynb.*{words}"):
        notebooks.check_outputs("x.ipynb", executed(output, CHART), claims)


def test_progress_frames_and_warnings_do_not_reach_a_page():
    """Frames vanish; a warning goes to the console."""
    text = "  2%|#   | 1/50 [00:00<00:00, 99.9it/s]\rdone\nConvergenceWarning: look\n"
    found = executed({"output_type": "stream", "name": "stderr", "text": [text]}, CHART)
    assert list(notebooks.warnings_of(found)) == ["cell 0: done", "cell 0: ConvergenceWarning: look"]
    assert notebooks.clean_notebook(found, "x", for_book=True)["cells"][0]["outputs"] == [CHART]


def test_passed_parameters_are_hidden_on_the_page_and_not_stored():
    """papermill's injected cell may hold a path."""
    cell = {"cell_type": "code", "metadata": {"tags": ["injected-parameters"]}, "source": "run = '../x'", "outputs": []}
    page, stored = (notebooks.clean_notebook({"cells": [cell]}, "x", for_book=which) for which in (True, False))
    assert page["cells"][0]["metadata"]["tags"] == ["injected-parameters", "remove-cell"]
    assert stored["cells"] == []


# ---- execution


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_runs_on_its_own_log_and_on_another_one(built, path):
    """Each publishes claims with label and origin, prints nothing and warns of nothing."""
    said = (built / "said").read_text("utf-8")
    assert [line for line in said.splitlines() if line.startswith(f"{path.name}, cell")] == []
    claims = json.loads((built / "values" / f"{path.stem}.json").read_text("utf-8"))
    assert claims and all(c["label"] in ("MEASURED", "SIM", "REPORTED") and c["origin"] for c in claims)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", [{}, {"kernelspec": {"name": "no-such-kernel", "display_name": "?", "language": "python"}}]
)
def test_the_present_environment_runs_a_notebook_whatever_kernel_it_names(tmp_path, kernel):
    path = notebook(tmp_path, "run: str = 'x'\nseed: int = 7", "import specsel.logs; specsel.logs.STATS", **kernel)
    with kernel_environment(tmp_path):
        run_notebook(path, tmp_path / "out.ipynb", {}, ROOT)
    assert "conf_mean" in json.dumps(notebooks.read_notebook(tmp_path / "out.ipynb")["cells"][-1]["outputs"])


@pytest.mark.slow
def test_a_failing_cell_is_named_with_its_notebook(tmp_path):
    path = notebook(tmp_path, "run: str = 'x'\nseed: int = 7", "raise RuntimeError('on purpose')")
    with (
        kernel_environment(tmp_path),
        pytest.raises(notebooks.BuildFailed, match="small.ipynb, cell 1: RuntimeError: on purpose"),
    ):
        run_notebook(path, tmp_path / "out.ipynb", {}, ROOT)
