// The settings: the options that the server offers, and the fields of the next request.

const $ = (id) => document.getElementById(id);
const METHODS = { ngram: "n-gram lookup", dflash: "DFlash", eagle3: "EAGLE-3", draft: "draft model", none: "no speculation" };

/** Fill the options from a model's entry in `/v1/models`. */
export function offer(model) {
  const { method = "none", max_tokens: max = 0, tokens = "auto" } = model.speculation ?? {};
  const speculates = method !== "none" && max > 0;
  const how = method.split("+").map((name) => METHODS[name] ?? name).join(", else ");
  choices($("drafter"), [...(speculates ? [["on", how]] : []), ["off", "off"]]);
  choices($("k"), [["", speculates && tokens !== "auto" ? `default (${tokens})` : "auto"], ...numbersUpTo(max)]);
  $("format").disabled = !model.structured_output;
  $("format").title = model.structured_output ? "" : "This server does not support structured output.";
  $("max-tokens").max = model.max_model_len ?? "";
  if (model.max_model_len < $("max-tokens").value) $("max-tokens").value = model.max_model_len;
  $("about").textContent = [model.id, how, speculates ? `K ${tokens}` : ""].filter(Boolean).join(" · ");
  showChosen();
}

const choices = (select, options) => select.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
const numbersUpTo = (max) => Array.from({ length: max }, (_, i) => [i + 1, i + 1]);

/** Show the fields that belong to the selected options. */
export function showChosen() {
  $("k").disabled = $("drafter").value === "off";
  for (const name of ["json_schema", "regex"]) {
    document.querySelectorAll(`.of-${name}`).forEach((field) => (field.hidden = $("format").value !== name));
  }
}

/** Select a JSON schema for the answers, or no structured output. */
export function chooseSchema(schema) {
  $("format").value = schema ? "json_schema" : "";
  if (schema) $("schema").value = JSON.stringify(schema, null, 2);
  showChosen();
}

/** The fields of a request with the current settings. Throws an Error with one sentence for an invalid field. */
export function chosen() {
  const seed = number("seed") ?? Math.floor(Math.random() * 2 ** 31); // explicit, so that the request can be repeated
  const request = { temperature: number("temperature"), max_tokens: number("max-tokens"), seed };
  if ($("drafter").value === "off") request.num_speculative_tokens = 0;
  else if ($("k").value) request.num_speculative_tokens = Number($("k").value);
  if ($("format").value === "json_schema") {
    request.response_format = { type: "json_schema", json_schema: { name: "answer", schema: schema(), strict: true } };
  } else if ($("format").value === "regex") request.response_format = { type: "regex", regex: $("regex").value };
  return request;
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
    throw new Error(`The JSON schema is not valid JSON: ${error.message}.`);
  }
}
