// Asking the server, and reading what it streams.

/** What the server, or the way to it, did not do, as a sentence. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Send a request; the response, or a `ServerError`. The path is relative to the page's own. */
export async function ask(path, { body, key, signal } = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    throw broken(error, "The server cannot be reached.");
  }
  if (response.ok) return response;
  const said = await response.json().then((data) => data.error?.message, () => null);
  const wait = response.headers.get("Retry-After");
  const words = said || `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  throw new ServerError(wait ? `${words} Try again in ${wait} s.` : words, response.status);
}

const broken = (error, words) => (error.name === "AbortError" ? error : new ServerError(words));

/** The chunks of a streamed answer. A stream that ends before its `[DONE]` is an error. */
export async function* chunks(response) {
  for await (const data of events(response.body.getReader())) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The server gave up.");
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer did.");
}

/** The data of each server-sent event. */
async function* events(reader) {
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (text + decoder.decode(value, { stream: true })).split(/\r?\n/);
      text = lines.pop(); // the line that is not whole yet
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } catch (error) {
    throw broken(error, "The connection broke before the answer was whole.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
