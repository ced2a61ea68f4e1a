/* Start a run: choose an environment or an agent file, change settings, go. The server checks as one types. */

import { run as runAction } from "../components/dialog.js";
import { field, lockedField } from "../components/fields.js";
import { notice, pageHead } from "../components/parts.js";
import { get, send } from "../lib/api.js";
import { debounce, h, replace } from "../lib/dom.js";
import { go, link, remember } from "../lib/router.js";

export async function show({ query, signal }) {
  const { environments, agents = [] } = await get("environments", {}, signal);
  const families = new Set(environments.map(({ family }) => family).filter(Boolean));
  const place = h("div");
  const subject = query.get("environment")
    ? `environment:${query.get("environment")}`
    : `agent_file:${query.get("agent_file") ?? "demo"}`;
  const choice = h(
    "select",
    { id: "subject", onchange: () => open(choice.value) },
    h(
      "optgroup",
      { label: "Agent files" },
      ["demo", ...agents.filter((file) => file !== "demo")].map((file) =>
        option("agent_file", file, file === "demo" ? "demo: a shop assistant, trained in two minutes" : file, subject),
      ),
    ),
    [null, ...families].map((family) =>
      h(
        "optgroup",
        { label: family ?? "Environments" },
        environments
          .filter((environment) => (environment.family ?? null) === family)
          .map(({ name }) => option("environment", name, name, subject)),
      ),
    ),
  );
  const open = async (value) => {
    const [kind, name] = [value.slice(0, value.indexOf(":")), value.slice(value.indexOf(":") + 1)];
    remember({ environment: null, agent_file: null, [kind]: name });
    try {
      replace(place, form({ [kind]: name }, await send("form", { [kind]: name }, "POST", signal)));
    } catch (error) {
      replace(place, notice("bad", error.message));
    }
  };
  if (subject.startsWith("environment:") || subject === "agent_file:demo") {
    await open(subject);
  } else {
    // Reading an agent file runs it, which an address alone must not do: a link in a mail can have any
    const read = () => open(subject);
    replace(place, h("button", { type: "button", onclick: read }, `Read ${query.get("agent_file")}`));
  }
  return [
    pageHead("New run", {
      crumbs: [["Runs", link(["runs"])]],
      lead: "It trains in the background, and goes on when this page is closed.",
    }),
    h("div.stack", h("div.card.field", h("label", { for: "subject" }, "What to train"), choice), place),
  ];
}

const option = (kind, name, label, subject) =>
  h("option", { value: `${kind}:${name}`, selected: `${kind}:${name}` === subject }, label);

function form(subject, data) {
  const values = () =>
    Object.fromEntries(fields.map((f) => [f.name, f.value()]).filter(([, value]) => value !== undefined));
  const check = debounce(async () => showErrors(await send("form/check", { ...subject, values: values() })), 350);
  const fields = data.fields.map((setting) => ({
    ...field(setting, check),
    common: setting.common,
    section: setting.section,
  }));
  const summary = h("div", { role: "alert" });
  const showErrors = ({ errors }) => {
    for (const f of fields) f.error(errors[f.name]);
    const others = Object.entries(errors).filter(([name]) => !fields.some((f) => f.name === name));
    replace(
      summary,
      others.length
        ? notice(
            "bad",
            others.map(([, text]) => h("p", text)),
          )
        : null,
    );
    submit.disabled = Object.keys(errors).length > 0;
  };
  const submit = h("button.primary", { type: "submit" }, "Start training");
  const name = h("input", { id: "run-name", placeholder: data.subject });
  const begin = (event) => {
    event.preventDefault();
    runAction(submit, async () => {
      const { run } = await send("runs", { ...subject, values: values(), ...(name.value ? { name: name.value } : {}) });
      go(["runs", run.id]);
    });
  };
  const rest = fields.filter((f) => !f.common);
  return h(
    "form.stack",
    { onsubmit: begin, novalidate: true },
    h(
      "section.card",
      h("h2", "Settings"),
      h(
        "div.form-grid",
        h("div.field", h("label", { for: "run-name" }, "run name"), name, h("div.hint", "How the run is listed.")),
        fields.filter((f) => f.common).map((f) => f.element),
      ),
    ),
    data.locked.length
      ? h("details.card", h("summary", h("b", "Fixed settings")), h("div.form-grid", data.locked.map(lockedField)))
      : null,
    rest.length ? h("details.card", h("summary", h("b", "All settings")), bySection(rest)) : null,
    summary,
    h("div.actions", submit, h("a.button", { href: link(["runs"]) }, "Cancel")),
  );
}

function bySection(fields) {
  const sections = Map.groupBy(fields, (f) => f.section);
  return [...sections].map(([name, all]) => [
    h("h3.section", name),
    h(
      "div.form-grid",
      all.map((f) => f.element),
    ),
  ]);
}
