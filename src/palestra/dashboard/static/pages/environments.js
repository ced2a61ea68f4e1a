/* What can be trained in: the environments that are installed or lie in this folder. */

import { empty, notice, pageHead } from "../components/parts.js";
import { get } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { link } from "../lib/router.js";
import { oneLine } from "../lib/text.js";

export async function show({ signal }) {
  const { environments, errors = {} } = await get("environments", {}, signal);
  const card = (environment) =>
    h(
      "article.card",
      h(
        "div.card-head",
        h("h2", h("a", { href: link(["environments", environment.name]) }, environment.name)),
        h("span.pill", environment.origin),
      ),
      h("p.soft", oneLine(environment.description ?? "", 200)),
    );
  return [
    pageHead("Environments", { lead: "Problems, tools and scores. Each can be tried with one click before a run." }),
    h(
      "div.stack",
      Object.entries(errors).map(([file, why]) => notice("warn", h("b.mono", file), h("p", why))),
      environments.length
        ? h("div.grid", environments.map(card))
        : h("div.card", empty("No environments", "Write one: ", h("code", "palestra env new"))),
    ),
  ];
}
