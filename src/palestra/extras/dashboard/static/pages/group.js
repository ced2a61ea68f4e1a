/* The siblings of one problem, side by side, best advantage first: what the difference in reward was made of. */

import { icon } from "../components/icons.js";
import { notice, passedPill, segmented } from "../components/parts.js";
import { rolloutLink } from "../components/rollout_table.js";
import { getRun, runHead } from "../components/run_head.js";
import { tokenSpan } from "../components/tokens.js";
import { transcript } from "../components/transcript.js";
import { verdicts } from "../components/verdicts.js";
import { address, get, runPath } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { columnsBeyond, kindQuery, number, plural, signed, when } from "../lib/format.js";
import { link } from "../lib/router.js";
import { textBlock } from "../lib/text.js";

const MOST_TOKENS = 2000; // of each sibling; the rest is in its own token view
const BEFORE = 12; // tokens that all share, for orientation

export async function show({ names: [id, number_], signal }) {
  const path = runPath(id, "groups", number_);
  const [run, group] = await Promise.all([getRun(id, signal), get(path, {}, signal)]);
  const question = group.rollouts[0]?.messages.filter((message) => message.role === "user")[0];
  const row = h("div.group", { tabindex: 0, role: "region", "aria-label": "Siblings" });
  const draw = async (view) => {
    const bodies = await Promise.all(
      group.rollouts.map((rollout) => (view === "tokens" ? tokensOf(id, rollout, group) : messagesOf(id, rollout))),
    );
    replace(
      row,
      group.rollouts.map((rollout, i) => sibling(id, rollout, run, bodies[i])),
    );
  };
  await draw("chat");
  const more = moreHint(row, group.rollouts.length, signal);
  const hasTokens = group.rollouts.every((rollout) => rollout.has_tokens);
  return [
    runHead(run, "rollouts"),
    h(
      "div.row.between.bar",
      h(
        "div",
        h("h2", `Group ${group.id} · ${when(group.kind, group.step)}`),
        h(
          "p.soft.small",
          plural(group.rollouts.length, "attempt"),
          " at ",
          h(
            "a",
            { href: link(["runs", id, "problems", group.problem_id], { kind: kindQuery(group.kind) }) },
            group.problem_id,
          ),
          group.rollouts.length > 1 ? ", best advantage first; the first difference is marked" : "",
        ),
      ),
      h(
        "div.row",
        hasTokens
          ? segmented(
              "View",
              [
                ["chat", "Conversation"],
                ["tokens", "Tokens"],
              ],
              "chat",
              draw,
            )
          : null,
        h("a.button", { href: address(`${path}/export.html`), download: "" }, icon("download"), "HTML"),
      ),
    ),
    h(
      "div.stack",
      group.equal && group.kind === "train"
        ? notice("warn", "All rewards are alike: every advantage is 0, and this group taught nothing.")
        : null,
      question ? h("section.card", h("h2", "The problem"), textBlock(question.text, { foldAt: 1500 })) : null,
      more,
      row,
    ),
  ];
}

/** A button that says how many attempts are out of view, and scrolls to them. */
function moreHint(row, count, signal) {
  const onclick = () => row.scrollBy({ left: 0.8 * row.clientWidth, behavior: "smooth" });
  const button = h("button.quiet.small", { type: "button", onclick });
  const line = h("div", { hidden: true }, button);
  const tell = () => {
    const hidden = columnsBeyond(count, row);
    line.hidden = !hidden;
    button.textContent = `${plural(hidden, "more attempt")} to the right →`;
  };
  const resize = new ResizeObserver(tell);
  resize.observe(row);
  row.addEventListener("scroll", tell, { signal });
  signal?.addEventListener("abort", () => resize.disconnect());
  return line;
}

function sibling(id, rollout, run, body) {
  const direction = rollout.advantage > 0 ? ".up" : rollout.advantage < 0 ? ".down" : "";
  return h(
    `article.sibling${direction}`,
    { "aria-label": `Rollout ${rollout.id}` },
    h(
      "div.row.between",
      h("div", h("b.figure", signed(rollout.advantage)), h("span.soft", " advantage")),
      passedPill(rollout.passed),
    ),
    h(
      "p.soft.small.bar",
      `reward ${number(rollout.reward)} · ${rollout.stop} · `,
      h("a", { href: rolloutLink(id, rollout) }, `rollout ${rollout.id}`),
    ),
    body,
    h("details.below", h("summary.soft.small", "Verdicts"), verdicts(rollout.scores, run.measures)),
  );
}

/** From the first answer on: the prompt is the same for all. */
function messagesOf(id, rollout) {
  const from = rollout.messages.findIndex((message) => message.role === "assistant");
  const mark =
    rollout.diverges_message === null || rollout.diverges_message === undefined
      ? null
      : { message: rollout.diverges_message, char: rollout.diverges_char };
  return transcript(rollout.messages, {
    run: id,
    rollout: rollout.id,
    mark,
    from: Math.max(0, from),
  });
}

async function tokensOf(id, rollout, group) {
  const start = Math.max(0, Math.min(group.prompt_tokens, group.diverges_at ?? Infinity) - BEFORE);
  const data = await get(runPath(id, "rollouts", rollout.id, "tokens"), { start, limit: MOST_TOKENS });
  const spans = data.text.map((text, i) => {
    const span = tokenSpan(text, start + i, data.mask[i]);
    if (start + i < group.diverges_at) span.classList.add("shared");
    if (start + i === rollout.diverges_at) span.classList.add("diverges");
    return span;
  });
  return h("div.tokens", { tabindex: 0, role: "group", "aria-label": `Tokens of rollout ${rollout.id}` }, spans);
}
