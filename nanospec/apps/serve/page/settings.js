// The settings: what the server offers, and what the next request asks for.

const $ = (id) => document.getElementById(id);
const HOW = { ngram: "n-gram lookup", medusa: "Medusa heads", draft: "a draft model", none: "no guesses" };

/** Fill the choices from what `/v1/models` says of the model. */
export function offer(model) {
  const { method = "none", max_tokens: most = 0, tokens = "auto" } = model.speculation ?? {};
  const guesses = method !== "none" && most > 0;
  const how = method.split("+").map((name) => HOW[name] ?? name).join(", else ");
  choices($("drafter"), [...(guesses ? [["on", how]] : []), ["off", "off"]]);
  choices($("k"), [["", guesses && tokens !== "auto" ? `the server's, ${tokens}` : "auto"], ...numbersUpTo(most)]);
  $("format").disabled = !model.structured_output;
  $("format").title = model.structured_output ? "" : "This server has no structured output.";
  $("max-tokens").max = model.max_model_len ?? "";
  $("about").textContent = [model.id, how, guesses ? `K ${tokens}` : ""].filter(Boolean).join(" · ");
  showChosen();
}

const choices = (select, options) => select.replaceChildren(...options.map(([value, words]) => new Option(words, value)));
const numbersUpTo = (most) => Array.from({ length: most }, (_, i) => [i + 1, i + 1]);

/** Show the fields of what is chosen. */
export function showChosen() {
  $("k").disabled = $("drafter").value === "off";
  for (const name of ["json_schema", "regex"]) {
    document.querySelectorAll(`.of-${name}`).forEach((field) => (field.hidden = $("format").value !== name));
  }
}

/** Choose that answers have this JSON schema, or none. */
export function chooseSchema(schema) {
  $("format").value = schema ? "json_schema" : "";
  if (schema) $("schema").value = JSON.stringify(schema, null, 2);
  showChosen();
}

/** What a request asks for, by the names of the API; an Error of one sentence where a field cannot be read. */
export function chosen() {
  const seed = number("seed") ?? Math.floor(Math.random() * 2 ** 31); // named, so that it can be asked for again
  const asked = { temperature: number("temperature"), max_tokens: number("max-tokens"), seed };
  if ($("drafter").value === "off") asked.num_speculative_tokens = 0;
  else if ($("k").value) asked.num_speculative_tokens = Number($("k").value);
  if ($("format").value === "json_schema") {
    asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema: schema(), strict: true } };
  } else if ($("format").value === "regex") asked.response_format = { type: "regex", regex: $("regex").value };
  return asked;
}

function number(id) {
  const field = $(id);
  if (!field.checkValidity()) throw new Error(`${field.labels[0].textContent}: ${field.validationMessage}`);
  return field.value === "" ? undefined : Number(field.value);
}

function schema() {
  try {
    return JSON.parse($("schema").value);
  } catch (error) {
    throw new Error(`The JSON schema is not JSON: ${error.message}.`);
  }
}
