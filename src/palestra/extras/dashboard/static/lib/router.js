/* Pages by the hash of the address: #/runs/demo/rollouts?step=5. The server serves one file, and back works. */

/** {parts: ["runs", "demo", "rollouts"], query: URLSearchParams} of the address now. */
export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

/** Parameters of an address; those without a value are left out. */
export const parametersOf = (values = {}) =>
  new URLSearchParams(Object.entries(values).filter(([, value]) => ![undefined, null, ""].includes(value)));

/** The address of a page: link(["runs", id], {step: 5}). */
export function link(parts, parameters) {
  const query = parametersOf(parameters);
  const tail = query.size ? `?${query}` : "";
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}${tail}`;
}

export function go(parts, parameters) {
  location.hash = link(parts, parameters);
}

/** Change parameters of this page's address without opening it again. */
export function remember(parameters) {
  const { parts, query } = place();
  history.replaceState(null, "", link(parts, { ...Object.fromEntries(query), ...parameters }));
}

/** Open this page again. */
export const refresh = () => dispatchEvent(new HashChangeEvent("hashchange"));
