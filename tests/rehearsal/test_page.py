# SPDX-License-Identifier: Apache-2.0
"""The page of a rehearsal: whole in itself, true to its report, safe, the same every time."""

import contextlib
import copy
import dataclasses
import html.parser
import re
import subprocess
import sys
import xml.etree.ElementTree

import matplotlib.figure
import pytest

from configs import topologies
from rehearsal import page, sections
from rehearsal.report import cost
from tests.browser import Browser
from tests.support import ROOT

EVIL = "<script>alert('&')</script>"
VOID = {"meta", "br", "img", "link", "input"}
CLASSES = ("parameters", "optimizer", "batch", "gradients", "saved activations", "temporaries")


def operation(name, seconds, flops=0.0, num_bytes=1e9):
    return {
        "name": name, "source": "layers/mlp.py:31", "category": "matmul" if flops else "element-wise",
        "pass": "backward", "seconds": seconds, "flops": flops, "bytes": num_bytes, "share": seconds / 2.5,
        "flops_per_second": flops / seconds, "intensity": flops / num_bytes, "bound": "compute" if flops else "memory",
    }  # fmt: skip


def fitting() -> dict:
    """A report of a step that fits, with every part."""
    return {
        "recipe": "large", "topology": "v4-32", "chips": 16, "hosts": 4, "accelerator": "tpu", "global_batch": 64,
        "sequence_length": 2048, "tokens_per_step": 131072, "typed": {"model.remat": "full"}, "fits": True,
        "compiled": True, "basis": "schedule of the TPU compiler", "num_parameters": 6738415616,
        "num_microbatches": 1, "mesh": {"data": 1, "fsdp": 16}, "peak_flops": 275e12, "memory_bandwidth": 1228e9,
        "compile_seconds": 70.3,
        "hbm_gib": {"parameters": 1.5, "optimizer": 3.25, "batch": 1e-4, "gradients": 1.5, "saved_activations": 2.0,
                    "temporaries": 5.25, "activations_and_temporaries": 8.75, "total": 13.5, "capacity": 32},
        "largest_buffers": [{"gib": 2.125, "class": "saved activations", "name": "stream of layers", "source": ""}],
        "memory_over_time": [{"seconds": at / 4} | dict.fromkeys(CLASSES, 0.5 + at / 9) for at in range(11)],
        "host_gib": 0.0, "notes": ["a note"], "hardware_utilisation": 0.5, "tokens_per_second_per_device": 3276.8,
        "step_seconds": 2.5, "mfu": 0.384, "tokens_per_second": 52428.8, "cost_per_billion_tokens": 272.9,
        "exposed_communication_seconds": 0.25, "hidden_communication_seconds": 0.75,
        "seconds_by_category": {"matmul": 2.0, "collective": 0.25, "element-wise": 0.125},
        "collectives": [{"kind": "all-gather", "axes": "fsdp", "asynchronous": True, "count": 8160, "gib": 28.5,
                         "source": "", "seconds": 0.68, "exposed_seconds": 0.004}],
        "operations": [operation("BTF,FD->BTD", 0.5, 8e13, 1e11), operation("twin", 0.5, 8e13, 1e11),
                       operation("near", 0.25, 4.2e13, 1e11), operation("add", 0.125)],
        "timelines": [{"name": "backward: jit(step)", "share": 0.58, "events": [
            {"lane": "core", "start": 0.0, "seconds": 0.03, "category": "matmul", "label": "BTF,FD->BTD/dot"},
            {"lane": "rings fsdp", "start": 0.01, "seconds": 0.001, "category": "collective", "label": "gather"}]}],
        "run": {"steps": 500000, "days": 14.5, "dollars": 17900.0}, "price_per_chip_hour": 3.22,
        "price_source": "list price as of 2025-11", "assumptions": [["peak", "275 TFLOP/s", "the data sheet"]],
        "advice": [{"keys": {"mesh.data": 2, "mesh.fsdp": 8}, "why": "shorter rings", "gain": 0.12,
                    "step_seconds": 2.2, "total_gib": 19.0, "fits": True, "expected": 0.1, "verified": True},
                   {"keys": {"train.global_batch": 128}, "why": "more work a byte", "gain": None,
                    "step_seconds": None, "total_gib": 24.0, "fits": True, "expected": 0.05, "verified": False}],
        "remedies": [],
    }  # fmt: skip


def too_large() -> dict:
    """A report of a step that does not compile for want of memory: nothing is known of its time."""
    report = {k: v for k, v in fitting().items() if k not in ("operations", "timelines", "seconds_by_category")}
    report["run"] = {"steps": None, "days": None, "dollars": None}
    times = [key for key in report if "seconds" in key or key in ("mfu", "cost_per_billion_tokens")]
    report |= dict.fromkeys(times) | {"fits": False, "compiled": False, "collectives": [], "advice": []}
    report |= {"memory_over_time": [], "largest_buffers": []}
    report["hbm_gib"] |= {"activations_and_temporaries": 39.5, "total": 44.25, "gradients": 0.0}
    remedy = {"what": "recomputes all", "total_gib": 20.0, "gives_gib": 24.25, "fits": True, "verified": False}
    return report | {"remedies": [remedy | {"keys": {"model.remat": "full"}}]}


class Reader(html.parser.HTMLParser):
    """Keeps what is said, tooltips too; asserts that every element is closed in its turn."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.ids, self.said = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.said)


def plots(text: str) -> list[xml.etree.ElementTree.Element]:
    return [xml.etree.ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def said(svg: xml.etree.ElementTree.Element) -> list[str]:
    return [e.text for e in svg.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("report", [fitting(), too_large()], ids=["fits", "too_large"])
def test_page_is_well_formed_whole_in_itself_and_the_same_every_time(report):
    text = page.page(report)
    reader = Reader(text)
    assert len(reader.ids) == len(set(reader.ids))
    assert set(re.findall(r"#([\w-]+)\)", text)) <= set(reader.ids)
    plots(text)
    elsewhere = re.sub(r' xmlns(:xlink)?="http://www\.w3\.org/(2000/svg|1999/xlink)"', "", text)
    assert not re.search(r"https?:|//|url\((?!#)|@import|<link|<script|(src|href)=\"(?!#)", elsewhere)
    assert page.page(copy.deepcopy(report)) == text


def test_page_tells_the_figures_of_its_report():
    text = Reader(page.page(fitting())).text
    for figure in (
        "large on v4-32: 16 chips, 4 hosts", "FITS: 13.5 of 32 GiB a chip", "MFU 38.4%, 52,429 tokens/s",
        "COST: $272.90 per billion tokens at $3.22", "fsdp 16", "6,738,415,616", "--config.model.remat=full",
        "$17,900.00", "saved activations", "stream of layers", "2.125", "8,160", "28.50", "layers/mlp.py:31",
        "160", "20.0%", "--config.mesh.data=2 --config.mesh.fsdp=8", "+12.0%", "275 TFLOP/s", "Untested (raise",
        "schedule of the TPU compiler", "80.0%", "a note", "BTF,FD->BTD/dot: matmul, 30.0 ms",
    ):  # fmt: skip
        assert figure in text


def test_on_a_narrow_screen_nothing_but_figures_and_tables_scrolls(tmp_path):
    (tmp_path / "page.html").write_text(page.page(fitting()))
    with contextlib.closing(Browser(tmp_path / "profile")) as browser:
        browser.open((tmp_path / "page.html").as_uri(), width=400)
        assert browser.value("document.documentElement.scrollWidth") == 400


def test_a_cost_that_is_a_bound_says_so():
    """That of a step with a rollout, whose time is a bound; without a price there is no source of one."""
    for more, most in (({}, ""), ({"rollout": {}}, "at most ")):
        section = sections._cost(fitting() | more)
        assert section.title.startswith(f"COST: {most}$272.90 per billion tokens")
        assert section.lines == [f"the configured run of 500,000 steps: {most}14 days, $17,900.00"]
    unpriced = dataclasses.replace(topologies.get("v4-8"), price_per_chip_hour=None)
    found = cost({"tokens_per_second": 1.0, "step_seconds": 1.0}, 1, unpriced)
    assert (found["price_per_chip_hour"], found["price_source"]) == (None, None)


def test_page_draws_memory_a_layer_and_the_roofline():
    memory, layer, roofline = map(said, plots(page.page(fitting())))
    assert {"capacity 32 GiB", "13.5 GiB in all", "temporaries", "seconds"} <= set(memory)
    assert {"1, 2", "3", "FLOP/byte"} <= set(roofline) and "4" not in roofline
    assert {"core", "rings fsdp", "milliseconds", "BTF,FD->BTD"} <= set(layer)


def test_page_of_a_step_that_does_not_fit_says_what_is_unknown_and_what_would_fit():
    text = page.page(too_large())
    assert '<h2 class="bad">DOES NOT FIT: 44.2 GiB' in text and '<h2 class="bad">' not in page.page(fitting())
    for figure in (
        "(the compiler refuses it)",
        "TIME AND COST: unknown",
        "WOULD FIT",
        "recomputes all",
        "not compiled",
    ):
        assert figure in Reader(text).text
    assert not plots(text)


def test_page_shows_the_time_of_a_step_that_compiles_and_does_not_fit():
    report = fitting() | {"fits": False}
    report["hbm_gib"] = report["hbm_gib"] | {"capacity": 8}
    text = page.page(report)
    assert "DOES NOT FIT: 13.5 GiB" in text and "TIME: 2.50 s a step" in text
    assert len(plots(text)) == 3


def test_page_bears_a_roof_without_known_bandwidth_and_no_operation_with_flops():
    assert len(plots(page.page(fitting() | {"memory_bandwidth": float("inf")}))) == 3
    assert len(plots(page.page(fitting() | {"operations": [operation("add", 0.125)]}))) == 2


def test_nothing_of_the_report_is_read_as_markup():
    def poisoned(value):
        if isinstance(value, dict):
            return {k: v if k in ("category", "class") else poisoned(v) for k, v in value.items()}
        if isinstance(value, list):
            return [poisoned(v) for v in value]
        return EVIL + value if isinstance(value, str) else value

    text = page.page(poisoned(fitting()) | {"typed": {EVIL: EVIL}})
    assert "<script" not in text
    Reader(text)
    assert len(plots(text)) == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.2, "3.20 s"), (0.9996, "1.00 s"), (0.9994, "999 ms"), (2e-5, "20.0 us"), (9.5e-10, "0.950 ns"),
        (1.3e-11, "0.0130 ns"), (0.0, "0.00 s"),
    ],
)  # fmt: skip
def test_seconds_have_three_figures(seconds, text):
    assert sections.seconds_text(seconds) == text


def test_the_rows_of_the_table_have_the_numbers_of_the_discs():
    text = page.page(fitting())
    rows = re.findall(r'<tr><td class="number">(\d+)</td><td>([^<]*)</td>', text)
    assert [int(number) for number, _ in rows] == [1, 2, 3, 4]
    discs = re.findall(r"<title>(\d): (BTF,FD-&gt;BTD|twin|near|add), ", text)
    assert len(discs) == 3 and set(discs) <= set(rows)


@pytest.mark.parametrize(("lowest", "labelled"), [(50.0, {"200", "500", "1000"}), (0.05, {"10", "1000"})])
def test_labels_of_an_axis_do_not_run_together(lowest, labelled):
    """Of an axis over many decades only the powers of ten are labelled."""
    assert [page._tick(value) for value in (0.5, 200, 5000, 50_000, 2e6)] == ["0.5", "200", "5000", "50k", "2M"]
    report = fitting()
    report["operations"][0]["intensity"] = lowest
    (roofline,) = plots(page._roofline(report))
    assert labelled <= set(said(roofline)) and ("500" in said(roofline)) == ("500" in labelled)


def test_numbers_in_the_roofline_lie_on_no_disc_and_no_other_number():
    discs = [(str(n), 100.0 + 7 * n, 100.0 + 3 * (n % 3), 6.0) for n in range(9)]
    roof = (0.0, 120.0, 400.0, 132.0)
    taken = [roof, *((x - r, y - r, x + r, y + r) for _, x, y, r in discs)]
    placed = list(page._label_places(discs, (400.0, 200.0), roof))
    assert len(placed) == len(discs)
    for text, _, (x, y), _ in placed:
        wide = 2.8 * len(text)
        assert all(x + wide <= a or c <= x - wide or y + 5 <= b or d <= y - 5 for a, b, c, d in taken)
        taken.append((x - wide, y - 5, x + wide, y + 5))


def test_the_time_of_a_layer_ends_with_its_last_event():
    figure = matplotlib.figure.Figure()
    of_all = {"category": "matmul", "label": "dot"}
    times = (("core", 0.0, 0.03), ("core", 0.025, 0.02), ("copies", 0.04, 0.001))
    events = [{"lane": lane, "start": start, "seconds": seconds} | of_all for lane, start, seconds in times]
    page._draw_layer({"events": events}, figure, {})
    assert figure.axes[0].get_xlim() == pytest.approx((0.0, 45.0))  # milliseconds


def test_matplotlib_is_not_imported_before_a_page_is_made():
    code = "import sys; from rehearsal import page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
