"""Does a judge agree with you? Kendall's tau between its scores and your labels, with a 95 % interval.

    python examples/judge_agreement.py labels.jsonl score.py:quality

Each line of labels.jsonl is an attempt with its label, a number or true/false (higher is better): `input` and `answer`,
and optionally `expect`, `rubric`, and `case`, by which attempts belong together (otherwise by their input).
The judge is a measure in a Python file, such as `quality = judge("qwen3:8b", "Be polite.", base_url=…)`.
"""

import asyncio
import json
import math
import sys
from pathlib import Path

from palestra.core.chat_model import hosting
from palestra.core.files import import_function, read_jsonl
from palestra.core.messages import as_messages
from palestra.core.types import Message, Problem
from palestra.evals.measures import MeasureContext, as_measure, run_group_measure
from palestra.rollout.local_models import LocalModels

try:
    from scipy.stats import bootstrap, kendalltau, pearsonr
except ImportError:
    sys.exit("this needs scipy; run: pip install scipy")


def attempt(row):
    """What the judge sees of a line."""
    messages = as_messages(row["input"])
    case = Problem(str(row.get("case", "")), messages, row.get("expect"), row)
    return MeasureContext((*messages, Message("assistant", row["answer"])), expect=case.expect, case=case)


async def score(judge, cases):
    """Each case's scores; a group measure such as ruler(…) sees the attempts at a case together."""
    return await asyncio.gather(*(run_group_measure(judge, [attempt(row) for row in rows], 600) for rows in cases))


def tau(scores, labels):
    """0 for a judge that scores all the same."""
    found = float(kendalltau(scores, labels).statistic)
    return 0.0 if math.isnan(found) else found


def agreement(cases):
    """Tau and its interval by resampling: the mean over cases with different labels, or over all attempts together."""
    options = {"vectorized": False, "method": "percentile", "n_resamples": 2000}
    taus = [tau(*zip(*case, strict=True)) for case in cases if len({label for _, label in case}) > 1]
    if len(taus) > 1:
        return sum(taus) / len(taus), bootstrap((taus,), lambda drawn: sum(drawn) / len(drawn), **options)
    pairs = list(zip(*(pair for case in cases for pair in case), strict=True))
    return tau(*pairs), bootstrap(pairs, tau, paired=True, **options)


def main(labels_file, judge):
    cases = {}
    for row in read_jsonl(Path(labels_file)):
        cases.setdefault(json.dumps(row.get("case", row["input"])), []).append(row)
    with hosting(LocalModels()):  # for judges that are models of this machine
        scores = asyncio.run(score(as_measure(import_function(judge, "the judge")), cases.values()))
    scored = [list(zip(*case, strict=True)) for case in zip(scores, cases.values(), strict=True)]
    lost = [s.reason for case in scored for s, _ in case if s.error]  # no verdict
    print(f"{sum(map(len, scored))} attempts at {len(scored)} cases, {len(lost)} without a verdict", *lost[:1])
    pairs = [[(s.value, float(row["label"])) for s, row in case if not s.error] for case in scored]
    if len({label for case in pairs for _, label in case}) < 2:
        sys.exit("no two attempts with a verdict have different labels")
    found, drawn = agreement(pairs)
    low, high = drawn.confidence_interval
    print(f"Kendall's tau {found:.2f} (95 % interval {low:.2f} to {high:.2f})")
    lengths = [len(row["answer"]) for case in scored for s, row in case if not s.error]
    columns = zip(*(pair for case in pairs for pair in case), strict=True)
    by_score, by_label = (pearsonr(lengths, column).statistic for column in columns)
    print(f"correlation with the length of the answer: of the scores {by_score:.2f}, of the labels {by_label:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__)
