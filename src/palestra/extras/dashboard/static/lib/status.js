/* What the server is: asked once. */

import { get } from "./api.js";

let answer = null;

/** {version, home, path, can_start, default_model}; `can_start` is false for a viewer that changes nothing. */
export const status = () => (answer ??= get("status").then((found) => ({ default_model: "palestra/tiny", ...found })));
