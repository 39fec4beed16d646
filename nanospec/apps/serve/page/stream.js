// Requests to the server, and parsing of streamed responses.

/** A failed request. The message is a sentence; status is 0 if there was no response. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Send a request and return the response. Throws a `ServerError`. The path is relative to the page's. */
export async function ask(path, { body, key, signal } = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    throw broken(error, "Could not reach the server.");
  }
  if (response.ok) return response;
  const message = await response.json().then((data) => data.error?.message, () => null);
  const wait = response.headers.get("Retry-After");
  const sentence = message || `The server returned ${response.status} ${response.statusText}`.trim() + ".";
  const hint = wait && !sentence.includes("try again") ? ` Try again in ${wait} s.` : "";
  throw new ServerError(sentence + hint, response.status);
}

const broken = (error, message) => (error.name === "AbortError" ? error : new ServerError(message));

/** Yield the chunks of a streamed answer. Throws if the stream ends before `[DONE]`. */
export async function* chunks(response) {
  for await (const data of events(response.body.getReader())) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The server reported an error.");
    yield chunk;
  }
  throw new ServerError("The connection closed before the answer was complete.");
}

/** Yield the data of each server-sent event. */
async function* events(reader) {
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (text + decoder.decode(value, { stream: true })).split(/\r?\n/);
      text = lines.pop(); // the incomplete last line
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } catch (error) {
    throw broken(error, "The connection was lost before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
