/* Talk to a checkpoint with its tools. What it samples appears as it is sampled. */

import { run as runAction } from "../components/dialog.js";
import { empty, notice, pageHead } from "../components/parts.js";
import { getRun } from "../components/run_head.js";
import { messageCard } from "../components/transcript.js";
import { get, send, stream } from "../lib/api.js";
import { append, h, replace } from "../lib/dom.js";
import { status } from "../lib/status.js";

export async function show({ query, signal }) {
  const [{ runs }, server] = await Promise.all([get("runs", { limit: 200 }, signal), status()]);
  const able = runs.filter((run) => run.actions.includes("chat"));
  const asked = query.get("run");
  const chosen = able.find((run) => run.id === asked) ?? able[0];
  const place = h("div");
  const who = h(
    "select",
    { id: "chat-run", onchange: () => fillCheckpoints() },
    able.map((run) => h("option", { value: run.id, selected: run === chosen }, `${run.name} (${run.id})`)),
    h("option", { value: "", selected: !chosen }, `untrained: ${server.default_model}`),
  );
  const checkpoint = h("select", { id: "chat-checkpoint" });
  const fillCheckpoints = async () => {
    checkpoint.disabled = !who.value;
    const run = who.value ? await getRun(who.value, signal) : { checkpoints: [] };
    const names = [
      ...(run.model_files ? [["", "trained model"]] : []),
      ...[...run.checkpoints].reverse().map((c) => [c.name, `step ${c.step}${c.best ? ", best" : ""}`]),
    ];
    replace(
      checkpoint,
      names.map(([value, label]) => h("option", { value, selected: value === query.get("checkpoint") }, label)),
    );
  };
  const temperature = h("input", { id: "chat-temperature", type: "number", min: 0, max: 2, step: 0.1, value: 0 });
  const begin = (event) => {
    event.preventDefault();
    const options = { temperature: Number(temperature.value), max_new_tokens: 512 };
    const body = who.value
      ? { run: who.value, checkpoint: checkpoint.value || null, ...options }
      : { model: server.default_model, ...options };
    return runAction(button, async () => {
      replace(place, h("p.loading", "Loading the model …"));
      try {
        const { chat } = await send("chats", body);
        replace(place, conversation(chat, signal));
        place.querySelector("textarea").focus();
      } catch (error) {
        replace(place, notice("bad", error.message));
      }
    });
  };
  const button = h("button.primary", { type: "submit" }, "Start the chat");
  await fillCheckpoints();
  replace(place, empty("Nobody here yet", "Choose who shall answer, and start the chat."));
  return [
    pageHead("Chat", { lead: "Talk to any checkpoint, with the tools that it was trained with." }),
    h(
      "div.columns",
      place,
      h(
        "form.card.stack",
        { onsubmit: begin },
        h("div.field", h("label", { for: "chat-run" }, "Run"), who),
        h("div.field", h("label", { for: "chat-checkpoint" }, "Checkpoint"), checkpoint),
        h("div.field", h("label", { for: "chat-temperature" }, "Temperature"), temperature),
        h("div", button),
      ),
    ),
  ];
}

function conversation(chat, pageSignal) {
  const list = h("div.transcript", { "aria-live": "polite" });
  const text = h("textarea", {
    rows: 1,
    placeholder: "Say something …",
    "aria-label": "Message",
    onkeydown: (event) => {
      if (event.key === "Enter" && !event.shiftKey) submit(event);
    },
  });
  const button = h("button.primary", { type: "submit" }, "Send");
  let answering = null; // ends the answer that is being sampled

  const submit = async (event) => {
    event.preventDefault();
    if (answering) return answering.abort();
    if (!text.value.trim()) return;
    list.append(messageCard({ role: "user", text: text.value }));
    const said = text.value;
    text.value = "";
    answering = new AbortController();
    button.textContent = "Stop";
    try {
      await answer(list, chat, said, answering.signal);
    } catch (error) {
      if (error.name !== "AbortError") list.append(notice("bad", error.message));
    }
    answering = null;
    button.textContent = "Send";
    text.focus();
  };
  pageSignal.addEventListener("abort", () => {
    answering?.abort();
    send(`chats/${chat.id}`, {}, "DELETE").catch(() => {}); // it would end by itself after a while
  });
  return h(
    "div.chat",
    h(
      "div.stack",
      h(
        "p.soft.small",
        chat.model,
        chat.tools.length ? ` · tools: ${chat.tools.join(", ")}` : " · no tools",
        chat.note ? ` · ${chat.note}` : "",
      ),
      list,
    ),
    h("form.composer", { onsubmit: submit }, text, button),
  );
}

/** Deltas fill a message that grows; the whole message then takes its place. */
async function answer(list, chat, said, signal) {
  let growing = null;
  for await (const { event, data } of stream(`chats/${chat.id}/say`, { text: said }, signal)) {
    if (event === "delta") {
      if (!growing)
        list.append((growing = h("article.message.assistant", h("header", "Model"), h("div.body", h("div.text")))));
      append(growing.querySelector(".text"), data.text);
    } else if (event === "message") {
      const card = messageCard(data);
      growing && data.role === "assistant" ? growing.replaceWith(card) : list.append(card);
      growing = null;
    } else if (event === "error") {
      list.append(notice("bad", data.message));
    } else if (event === "done" && data.stop !== "answered") {
      list.append(h("p.soft.small", `Ended: ${data.stop}`));
    }
    list.lastElementChild?.scrollIntoView({ block: "nearest" });
  }
}
