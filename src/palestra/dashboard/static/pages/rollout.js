/* One rollout: what was said, what each measure made of it, and every token. */

import { icon } from "../components/icons.js";
import { facts, notice, passedPill, segmented, stats } from "../components/parts.js";
import { rolloutLink } from "../components/rollout_table.js";
import { getRun, runHead, runPath } from "../components/run_head.js";
import { TokenView } from "../components/tokens.js";
import { transcript } from "../components/transcript.js";
import { verdicts } from "../components/verdicts.js";
import { address, get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { duration, integer, number, signed } from "../lib/format.js";
import { setKeys } from "../lib/keys.js";
import { link, remember } from "../lib/router.js";
import { textBlock } from "../lib/text.js";

export async function show({ names: [id, number_], query, signal }) {
  const path = runPath(id, "rollouts", number_);
  const [run, rollout] = await Promise.all([getRun(id, signal), get(path, {}, signal)]);
  const body = h("div");
  let view = query.get("view") ?? "chat";
  const draw = async () => {
    remember({ view: view === "chat" ? null : view });
    if (view === "chat")
      return replace(
        body,
        transcript(rollout.messages, { run: id, rollout: rollout.id, results: rollout.tool_results }),
      );
    const tokens = new TokenView(`${path}/tokens`, {
      column: query.get("column") ?? "maker",
      onColumn: (column) => remember({ column }),
    });
    return replace(body, (await tokens.open()).element);
  };
  await draw();

  const views = rollout.has_tokens
    ? segmented(
        "View",
        [
          ["chat", "Conversation"],
          ["tokens", "Tokens"],
        ],
        view,
        (value) => ((view = value), draw()),
      )
    : null;
  const step = (label, target, name) =>
    target === null || target === undefined
      ? null
      : h(
          "a.button.quiet",
          {
            href: rolloutLink(id, { id: target }, { view: view === "chat" ? null : view }),
            "aria-label": label,
            title: label,
          },
          icon(name, 18),
        );
  setKeys({
    ...(rollout.previous == null
      ? {}
      : { ArrowLeft: ["Rollout before", () => (location.hash = rolloutLink(id, { id: rollout.previous }))] }),
    ...(rollout.next_id == null
      ? {}
      : { ArrowRight: ["Next rollout", () => (location.hash = rolloutLink(id, { id: rollout.next_id }))] }),
    s: ["The group, side by side", () => (location.hash = link(["runs", id, "groups", rollout.group]))],
  });
  const bar = h(
    "div.row.between",
    { style: { "margin-bottom": "16px" } },
    h(
      "div.row",
      step("Rollout before", rollout.previous, "left"),
      h("h2", `Rollout ${rollout.id}`),
      step("Next rollout", rollout.next_id, "right"),
      passedPill(rollout.passed),
    ),
    h(
      "div.row",
      views,
      rollout.siblings?.length > 1
        ? h("a.button", { href: link(["runs", id, "groups", rollout.group]) }, `Group of ${rollout.siblings.length}`)
        : null,
      h("a.button", { href: link(["runs", id, "problems", rollout.problem_id]) }, "Same problem over training"),
      h("a.button", { href: address(`${path}/export.html`), download: "" }, icon("download"), "HTML"),
    ),
  );
  return [runHead(run, "rollouts"), bar, h("div.columns", body, sideOf(rollout, run))];
}

function sideOf(rollout, run) {
  return h(
    "aside.stack",
    rollout.error ? notice("bad", h("b", "Error"), textBlock(rollout.error, { foldAt: 1500 })) : null,
    h(
      "section.card",
      h("h2", "Verdict"),
      stats([
        ["reward", number(rollout.reward)],
        ["advantage", signed(rollout.advantage)],
      ]),
      h("div", { style: { height: "16px" } }),
      verdicts(rollout.scores, run.measures),
    ),
    h(
      "section.card",
      h("h2", "Numbers"),
      facts([
        ["Step", rollout.kind === "train" ? rollout.step : rollout.kind],
        ["Problem", h("span.mono", rollout.problem_id)],
        ["Ended", rollout.stop],
        ["Turns", integer(rollout.turns)],
        ["Tool calls", integer(rollout.tool_calls)],
        ["Tokens", `${integer(rollout.sampled_tokens)} sampled of ${integer(rollout.tokens)}`],
        ["Time", `${duration(rollout.seconds)}, tools ${duration(rollout.tool_seconds)}`],
      ]),
    ),
  );
}
