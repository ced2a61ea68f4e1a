"""The dashboard in a real browser, over run folders that a script made: every page, every theme, hostile text."""

import make_runs
import pytest

from palestra.core.files import write_jsonl
from palestra.core.group_codec import rollout_to_dict
from palestra.extras.dashboard.catalog import Catalog
from palestra.runs.manager import RunManager

pytestmark = pytest.mark.slow("make test-browser drives a Chromium")

RUN_PAGES = ("", "/rollouts", "/problems", "/cheating", "/evaluations", "/rescore", "/checkpoints", "/logs", "/config")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By name: a run that learns, a hacked one, and one full of hostile text."""
    root = tmp_path_factory.mktemp("runs")
    weights = {"contains_word": 1.0, "true_answer": 0.0}
    made = {
        "shop": make_runs.write_run(root / "shop", make_runs.plain_groups(96, per_step=4, size=4)),
        "hacked": make_runs.write_run(root / "hacked", make_runs.hacked_groups(12), reward_weights=weights),
        "hostile": make_runs.write_run(root / "hostile", make_runs.hostile_groups()),
    }
    _evaluate(made["shop"], 0.2, 0.9)
    return made


def _evaluate(run, *rates):
    """Held-out problems before and after: the first `rate` of 40 pass."""
    rng = make_runs.random.Random(0)
    run.evals.mkdir()
    for when, rate in zip(("before", "after"), rates, strict=True):
        made = [make_runs.make_rollout(rng, problem, passed=problem < 40 * rate) for problem in range(40)]
        write_jsonl(run.eval_file(when), map(rollout_to_dict, made))


@pytest.fixture(scope="module")
def url(folders, serve_dashboard, tmp_path_factory):
    catalog = Catalog(RunManager(tmp_path_factory.mktemp("home")), list(folders.values()))
    return serve_dashboard(catalog)


@pytest.fixture
def ids(page, visit, url):
    """The ids of the runs by name; the list of runs is open."""
    visit(url)
    return page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('tr.open')]"
        ".map((row) => [row.querySelector('b').textContent, row.dataset.href.split('/').pop()]))"
    )


def places(ids):
    """The address of every page of a run."""
    shop = f"#/runs/{ids['shop']}"
    single = [f"{shop}/rollouts/1", f"{shop}/rollouts/1?view=tokens", f"{shop}/groups/1", f"{shop}/problems/suite-1"]
    hacked = f"#/runs/{ids['hacked']}/cheating"
    return ["#/runs", *(shop + page for page in RUN_PAGES), *single, hacked]


@pytest.mark.parametrize(("theme", "rules"), [("light", ()), ("dark", ("color-contrast",))])
def test_axe_finds_nothing_wrong_with_any_page(page, visit, url, ids, violations, theme, rules) -> None:
    page.dark(theme == "dark")
    found = []
    for place in places(ids):
        visit(url, place)
        found += [f"{place}: {violation}" for violation in violations(*rules)]
    assert not found, "\n".join(found)


def test_no_page_scrolls_sideways_on_a_phone(page, visit, url, ids) -> None:
    page.size(390, 844, phone=True)
    for place in places(ids):
        visit(url, place)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, place


def test_the_list_of_runs_is_searched_as_one_types(page, ids) -> None:
    assert len(ids) == 3
    page.type("input[type=search]", "hack")
    page.wait("document.querySelectorAll('tr.open').length === 1")
    page.wait_for("tr.open b", "hacked")
    page.type("input[type=search]", "no such run")
    page.wait_for("main", "No run matches")


def test_a_run_shows_its_curves_and_the_numbers_under_the_mouse(page, visit, url, ids) -> None:
    visit(url, f"#/runs/{ids['shop']}")
    page.wait_for(".chart canvas")
    page.hover(".chart .u-over")
    page.wait_for(".chart-tip:not([hidden])", "step")


def test_rollouts_are_filtered_and_found_by_their_text(page, visit, url, ids) -> None:
    visit(url, f"#/runs/{ids['shop']}/rollouts")
    page.wait_for("main", "96 rollouts")
    page.choose("select[aria-label='Any verdict']", "0")
    page.wait("!document.querySelector('main').innerText.includes('96 rollouts')")
    assert "passed" not in page.text("tbody")
    page.choose("select[aria-label='Any verdict']", "")
    page.type("input[type=search]", '"brown mirrors"')
    page.wait_for("tbody mark")
    assert "q=" in page.evaluate("location.hash")


def test_a_row_is_reached_and_opened_by_keys_alone(page, visit, url, ids) -> None:
    visit(url, f"#/runs/{ids['shop']}/rollouts")
    for key in ("j", "j", "k", "o"):
        page.press(key)
    page.wait_for(".transcript")
    page.press("?")
    page.wait_for("dialog", "The group, side by side")


def test_a_rollout_shows_the_conversation_with_verdict_and_reason_and_is_exported_as_one_file(
    page, visit, url, ids, folders
) -> None:
    row = next(folders["shop"].rollouts())
    visit(url, f"#/runs/{ids['shop']}/rollouts/1")
    text = page.text()
    assert row["messages"][1]["text"] in text
    assert row["messages"][-1]["text"] in text
    assert row["scores"]["right_total"]["reason"] in text
    assert page.count(".call") == len(row["tool_results"])
    html = page.evaluate("fetch(document.querySelector('a[download]').href).then((r) => r.text())")
    assert html.lower().startswith("<!doctype html>")
    assert "What do" in html
    assert "src=" not in html


def test_a_group_stands_side_by_side_best_advantage_first(page, visit, url, ids, folders) -> None:
    rewards = [row["reward"] for row in folders["shop"].rollouts()]
    starts = range(0, len(rewards), 4)
    start = next(start for start in starts if len(set(rewards[start : start + 4])) == 2)
    visit(url, f"#/runs/{ids['shop']}/rollouts/{start + 1}")
    page.click("a.button", "Group of 4")
    page.wait_for(".sibling")
    shown = page.evaluate("[...document.querySelectorAll('.sibling b:first-child')].map((b) => b.textContent)")
    advantages = [float(text.replace("−", "-")) for text in shown if text[0] in "+−"]
    assert advantages == sorted(advantages, reverse=True)
    assert advantages[0] > 0 > advantages[-1]
    page.click(".segmented button", "Tokens")
    page.wait_for(".sibling .token.diverges")


def test_the_token_view_has_the_numbers_of_the_file(page, visit, url, ids, folders) -> None:
    row = next(folders["shop"].rollouts())
    visit(url, f"#/runs/{ids['shop']}/rollouts/1?view=tokens")
    before = len(row["turns"][0]["token_ids"])
    said = row["turns"][1]
    for offset in (0, 3):
        page.hover(f".token[data-index='{before + offset}']")
        page.wait_for(".token-tip", f"token {before + offset}")
        shown = page.evaluate("Object.fromEntries([...document.querySelectorAll('.token-tip dt')]"
                              ".map((e) => [e.textContent, e.nextSibling.textContent]))")  # fmt: skip
        assert int(shown["id"]) == said["token_ids"][offset]
        assert float(shown["logprob"]) == pytest.approx(said["logprobs"][offset], abs=1e-6)
        assert (shown["maker"], shown["trained"]) == ("model", "yes")


def test_one_click_leads_to_the_least_likely_token(page, visit, url, ids, folders) -> None:
    row = next(folders["shop"].rollouts())
    worst = min(x for turn in row["turns"] for x in turn.get("logprobs", ()))
    visit(url, f"#/runs/{ids['shop']}/rollouts/1?view=tokens")
    page.click(".segmented button", "Logprob")
    page.click("[data-jump]")
    page.wait_for(".token.picked")
    assert float(page.text(".token-tip dl dd:nth-of-type(5)")) == pytest.approx(worst, abs=1e-6)


def test_a_hacked_run_raises_the_alarm_and_leads_to_the_rollouts_that_passed(page, visit, url, ids) -> None:
    visit(url, f"#/runs/{ids['hacked']}/cheating")
    assert "true_answer" in page.text("[role=alert]")
    page.wait_for(".chart canvas")
    page.click("[role=alert] a", "Newest rollouts that passed")
    page.wait_for("tbody", "certified")
    assert "failed" not in page.text("tbody")


def test_hostile_text_does_nothing_and_is_seen(page, visit, url, ids) -> None:
    for number in range(1, 11):
        visit(url, f"#/runs/{ids['hostile']}/rollouts/{number}")
        assert page.evaluate("document.querySelectorAll('main script, main img, main svg[onload]').length") == 0
        assert "owned" not in page.evaluate("document.title")
        marks = page.evaluate("[...document.querySelectorAll('.transcript .hidden-char')].map((e) => e.textContent)")
        assert number not in (3, 4) or "ESC" in marks
        assert number not in (5, 6) or {"RLO", "ZWSP", "BOM"} <= set(marks)
        # no character that turns or hides others is left anywhere on the page
        assert not page.evaluate(r"/[\u202a-\u202e\u2066-\u2069\u200b\u001b]/.test(document.body.textContent)")
    for place in ("/rollouts", "/groups/1", "/problems", "/cheating", "/rollouts?q=script"):
        visit(url, f"#/runs/{ids['hostile']}{place}")
    assert "owned" not in page.evaluate("document.title")


def test_a_message_of_10_mb_is_folded_and_shown_in_parts(page, visit, url, ids) -> None:
    visit(url, f"#/runs/{ids['hostile']}/rollouts/11")
    assert len(page.text()) < 40_000
    page.click(".transcript .fold", "10 MB")
    page.wait("document.querySelector('.transcript').textContent.length > 15_000")
    page.click(".transcript .fold", "10 MB")
    page.wait("document.querySelector('.transcript').textContent.length > 200_000")


def test_the_theme_stays_after_a_reload(page, visit, url) -> None:
    visit(url)
    page.press("t")  # light
    page.press("t")  # dark
    page.wait("document.documentElement.dataset.theme === 'dark'")
    page.command("Page.reload")
    page.wait("document.querySelector('[data-theme=dark] h1')")
    page.evaluate("localStorage.clear()")
