/* A conversation as a chat: who spoke, tool calls with their arguments, what came back. */

import { get, runPath } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { duration } from "../lib/format.js";
import { textBlock } from "../lib/text.js";

const ROLES = { system: "System", user: "User", assistant: "Model", tool: "Tool" };
const THINKING = /^\s*<think>([\s\S]*?)<\/think>\s*/;
const MARK_LENGTH = 24; // characters drawn as the place where siblings part

/** messages → nodes. `run` and `rollout` say where the rest of a cut text is; `mark` is {message, char}. */
export function transcript(messages, { run = null, rollout = null, mark = null, from = 0 } = {}) {
  const nodes = messages.slice(from).map((message, i) => {
    const index = from + i;
    const load = message.cut && run ? (start) => rest(run, rollout, index, start) : null;
    return messageCard(message, { load, mark: mark?.message === index ? mark : null });
  });
  return h("div.transcript", nodes);
}

/** `mark.char` is where in the text the first difference is; null: in its tool calls. */
function messageCard(message, { load = null, mark = null } = {}) {
  const at = mark?.char ?? null;
  const thinking = at === null ? message.text.match(THINKING) : null;
  const body = thinking ? message.text.slice(thinking[0].length) : message.text;
  return h(
    `article.message.${ROLES[message.role] ? message.role : "system"}`,
    h(
      "header",
      ROLES[message.role] ?? message.role,
      message.name && h("code", message.name),
      message.result && resultNote(message.result),
    ),
    h(
      "div.body",
      thinking && h("details.thinking", h("summary", "Thinking"), textBlock(thinking[1])),
      at === null ? body && textBlock(body, { whole: message.chars, load }) : markedText(body, at),
      (message.tool_calls ?? []).map((call) => toolCall(call, mark !== null && at === null)),
    ),
  );
}

function toolCall(call, isMarked) {
  const text = typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments ?? {}, null, 1);
  const line = text.replace(/\n\s*/g, " ").replace(/^\{ | \}$/g, (end) => end.trim());
  return h(
    `div.call${call.error ? ".bad" : ""}${isMarked ? ".diverges" : ""}`,
    h("b", call.name || "unreadable call"),
    " ",
    line.length < 100 ? h("code", line) : textBlock(text, { tag: "pre" }),
    call.error && h("div.bad.small", call.error),
  );
}

function resultNote(result) {
  return [h(`span.pill${result.ok ? "" : ".bad"}`, result.ok ? "ok" : "error"), h("span", duration(result.seconds))];
}

function markedText(text, at) {
  const characters = Array.from(text); // the server counts characters, not UTF-16 units
  const part = (from, to) => characters.slice(from, to).join("");
  return h(
    "div.text",
    part(0, at),
    h("mark.diverges", { title: "The first difference" }, part(at, at + MARK_LENGTH) || "∎"),
    part(at + MARK_LENGTH),
  );
}

async function rest(run, rollout, index, start) {
  const { text } = await get(runPath(run, "rollouts", rollout, "messages", index), { start, limit: 200_000 });
  return text;
}
