/* One rollout: what was said, what each measure made of it, and every token. */

import { icon } from "../components/icons.js";
import { facts, notice, passedPill, segmented, stats } from "../components/parts.js";
import { rolloutLink } from "../components/rollout_table.js";
import { getRun, runHead } from "../components/run_head.js";
import { TokenView } from "../components/tokens.js";
import { transcript } from "../components/transcript.js";
import { verdicts } from "../components/verdicts.js";
import { address, get, runPath } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { duration, integer, kindQuery, number, signed, when } from "../lib/format.js";
import { setKeys } from "../lib/keys.js";
import { link, place, remember } from "../lib/router.js";
import { textBlock } from "../lib/text.js";

const VIEWS = [
  ["chat", "Conversation"],
  ["answers", "Without tools"],
  ["tokens", "Tokens"],
];

export async function show({ names: [id, which], query, signal }) {
  const path = runPath(id, "rollouts", which);
  const [run, rollout] = await Promise.all([getRun(id, signal), get(path, {}, signal)]);
  const views = VIEWS.filter(([name]) =>
    name === "tokens" ? rollout.has_tokens : name === "chat" || rollout.tool_calls,
  );
  const body = h("div");
  const draw = async (view) => {
    remember({ view: view === "chat" ? null : view });
    replace(body, view === "tokens" ? await tokensOf(path) : messagesOf(id, rollout, view === "chat"));
  };
  const view = query.get("view") ?? "chat";
  await draw(view);
  setKeys(keysOf(id, rollout));
  const choice = views.length > 1 ? segmented("View", views, view, draw) : null;
  return [runHead(run, "rollouts"), bar(id, rollout, path, choice), h("div.columns", body, sideOf(rollout, run))];
}

async function tokensOf(path) {
  const column = place().query.get("column") ?? "maker";
  const tokens = new TokenView(`${path}/tokens`, { column, onColumn: (name) => remember({ column: name }) });
  return (await tokens.open()).element;
}

function messagesOf(id, rollout, withTools) {
  const element = transcript(rollout.messages, { run: id, rollout: rollout.id });
  element.classList.toggle("without-tools", !withTools);
  return element;
}

/** Another rollout in the same view. */
const beside = (id, other) => rolloutLink(id, { id: other }, Object.fromEntries(place().query));

function keysOf(id, rollout) {
  const open = (href) => () => (location.hash = href());
  return {
    ...(rollout.previous && { ArrowLeft: ["Rollout before", open(() => beside(id, rollout.previous))] }),
    ...(rollout.next_id && { ArrowRight: ["Next rollout", open(() => beside(id, rollout.next_id))] }),
    s: ["The group, side by side", open(() => link(["runs", id, "groups", rollout.group]))],
  };
}

function bar(id, rollout, path, choice) {
  const step = (label, other, name) => {
    const onclick = (event) => (event.currentTarget.href = beside(id, other)); // the view may have changed
    return (
      other &&
      h("a.button.quiet", { href: beside(id, other), "aria-label": label, title: label, onclick }, icon(name, 18))
    );
  };
  const group = link(["runs", id, "groups", rollout.group]);
  return h(
    "div.row.between.bar",
    h(
      "div.row",
      step("Rollout before", rollout.previous, "left"),
      h("h2", `Rollout ${rollout.id}`),
      step("Next rollout", rollout.next_id, "right"),
      passedPill(rollout.passed),
    ),
    h(
      "div.row",
      choice,
      rollout.siblings?.length > 1 && h("a.button", { href: group }, `Group of ${rollout.siblings.length}`),
      h(
        "a.button",
        { href: link(["runs", id, "problems", rollout.problem_id], { kind: kindQuery(rollout.kind) }) },
        "Same problem over training",
      ),
      h("a.button", { href: address(`${path}/export.html`), download: "" }, icon("download"), "HTML"),
    ),
  );
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
      h("div.below", verdicts(rollout.scores, run.measures)),
    ),
    h(
      "section.card",
      h("h2", "Numbers"),
      facts([
        ["When", when(rollout.kind, rollout.step)],
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
