/* The server's JSON, and its events. Addresses are relative, so the dashboard works under any prefix. */

import { parametersOf } from "./router.js";

const ROOT = new URL("api/", document.baseURI);

/** The address of a route with its parameters. */
export function address(path, parameters) {
  const url = new URL(path, ROOT);
  url.search = parametersOf(parameters);
  return url;
}

/** The path of a route of one run. */
export const runPath = (id, ...rest) => ["runs", id, ...rest].map((part) => encodeURIComponent(part)).join("/");

export const get = (path, parameters, signal) => request(address(path, parameters), { signal });

export const send = (path, body = {}, method = "POST", signal = undefined) =>
  request(address(path), {
    method,
    body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" },
    signal,
  });

/** Server-sent events until `close()` of what is returned, or the signal; the browser connects again by itself. */
export function follow(path, handlers, signal, parameters) {
  const source = new EventSource(address(path, parameters));
  signal?.addEventListener("abort", () => source.close());
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handle(event.data ? JSON.parse(event.data) : null));
  }
  return source;
}

async function request(url, options) {
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `palestra dashboard` still running?");
  }
  if (!response.ok) throw new Error(await reason(response));
  return response.status === 204 ? null : response.json();
}

async function reason(response) {
  try {
    const body = await response.json();
    const error = body.error ?? body.detail ?? body.message;
    return typeof error === "string" ? error : (error?.message ?? JSON.stringify(error ?? body));
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}
