// Example prompts: an edit that copies most of its input, a quotation, structured output, and free writing.

const CODE = `class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def size(self):
        return len(self.items)
`;

const STORY = `The lighthouse keeper rose before dawn, as she had done every day for thirty years. She climbed the \
hundred and twelve steps, wiped the salt from the glass, and put out the lamp only when the sun had cleared the horizon. \
Then she wrote the weather in her book: wind from the north-west, a heavy swell, two ships far out.`;

const PERSON = {
  type: "object",
  properties: { name: { type: "string" }, occupation: { type: "string" }, years_at_work: { type: "integer" } },
  required: ["name", "occupation", "years_at_work"],
  additionalProperties: false,
};

/** Name, prompt, and optionally the JSON schema of the answer. */
export const EXAMPLES = [
  ["Edit code", `Rename the class Stack to Pile and return the whole code.\n\n\`\`\`python\n${CODE}\`\`\``],
  ["Quote a text", `Repeat this text word for word:\n\n${STORY}`],
  ["Extract JSON", "Extract as JSON: Ada Finch has kept the lighthouse on Gull Rock for 31 years.", PERSON],
  ["Free-form text", "Why do people enjoy music?"],
];
