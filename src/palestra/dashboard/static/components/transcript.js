/* A conversation as a chat: who spoke, tool calls with their arguments, what came back. */

import { get } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { duration } from "../lib/format.js";
import { textBlock, visible } from "../lib/text.js";

const ROLES = { system: "System", user: "User", assistant: "Model", tool: "Tool" };
const THINKING = /^\s*<think>([\s\S]*?)<\/think>\s*/;
const MARK_LENGTH = 24; // characters drawn as the place where siblings part

/** messages → nodes. `run` and `rollout` say where the rest of a cut text is; `mark` is {message, char}. */
export function transcript(messages, { run = null, rollout = null, results = [], mark = null, from = 0 } = {}) {
  const resultOf = new Map(results.map((result) => [result.id, result]));
  const nodes = messages.slice(from).map((message, i) => {
    const index = from + i;
    const load = message.cut && run ? (start) => rest(run, rollout, index, start) : null;
    const at = mark?.message === index ? mark.char : null;
    return messageCard(message, { result: resultOf.get(message.tool_call_id), load, at });
  });
  return h("div.transcript", nodes);
}

export function messageCard(message, { result = null, load = null, at = null } = {}) {
  const thinking = message.text.match(THINKING);
  const body = thinking && at === null ? message.text.slice(thinking[0].length) : message.text;
  return h(
    `article.message.${ROLES[message.role] ? message.role : "system"}`,
    h(
      "header",
      ROLES[message.role] ?? message.role,
      message.name && h("code", message.name),
      result && resultNote(result),
    ),
    h(
      "div.body",
      thinking && at === null && h("details.thinking", h("summary", "Thinking"), textBlock(thinking[1])),
      at === null ? body && textBlock(body, { whole: message.chars, load }) : markedText(body, at),
      (message.tool_calls ?? []).map(toolCall),
    ),
  );
}

function toolCall(call) {
  const text = typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments ?? {}, null, 1);
  const isSmall = text.length < 100;
  return h(
    `div.call${call.error ? ".bad" : ""}`,
    h("b", ...visible(call.name || "unreadable call")),
    " ",
    isSmall ? h("code", ...visible(text.replace(/\s+/g, " "))) : textBlock(text, { tag: "pre" }),
    call.error && h("div.bad.small", ...visible(call.error)),
  );
}

function resultNote(result) {
  return [h(`span.pill${result.ok ? "" : ".bad"}`, result.ok ? "ok" : "error"), h("span", duration(result.seconds))];
}

function markedText(text, at) {
  const characters = Array.from(text); // the server counts characters, not UTF-16 units
  const part = (from, to) => visible(characters.slice(from, to).join(""));
  const difference = part(at, at + MARK_LENGTH);
  return h(
    "div.text",
    ...part(0, at),
    h("mark.diverges", { title: "The first difference" }, ...(difference.length ? difference : ["∎"])),
    ...part(at + MARK_LENGTH),
  );
}

async function rest(run, rollout, index, start) {
  const part = await get(`runs/${encodeURIComponent(run)}/rollouts/${rollout}/messages/${index}`, {
    start,
    limit: 200_000,
  });
  return part.text;
}
