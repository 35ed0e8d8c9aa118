/** Panel 5: the state as text, to be copied and pasted. */

import { computed, effect, signal } from "@preact/signals";
import type { ModelInfo, Writing } from "../engine/types";
import { charactersOf, engine, newest, report } from "../models";
import { packWriting, unpackWriting } from "../state_text";
import {
  continued, draft, model, seed, STATE_LIMIT, stateText, temperature, TEXT_LIMIT, topK, WRITTEN_LIMIT,
} from "../view";
import { Panel, TextField } from "./parts";
import { promptTokens } from "./writers";

/** Characters per press of a button. */
const MORE = 100;

const note = signal("");
const copied = signal("");
const problem = signal("");
const continuation = signal("");
let writingOn = false;

const options = () => ({ temperature: temperature.value, topK: topK.value, resetEvery: null });
const asText = (info: ModelInfo, tokens: Iterable<number>) => charactersOf(info, tokens).join("");

/** Read the text. Draws are counted by its length, so that a text and its state continue alike. */
async function readDraft(): Promise<{ info: ModelInfo; writing: Writing }> {
  const info = await engine.load(model.value);
  const first = await promptTokens(info, draft.value);
  note.value = first.note;
  const writing = await engine.start(info.name, first.tokens, seed.value, null);
  return { info, writing: { ...writing, draws: first.tokens.length } };
}

/** Write on, once at a time. What was typed meanwhile has not been read, so nothing is appended to it. */
async function writeOn(): Promise<void> {
  if (writingOn) return;
  writingOn = true;
  try {
    const before = draft.value;
    const { info, writing } = await readDraft();
    const { tokens } = await engine.write(info.name, writing, MORE, options());
    if (draft.value === before) draft.value += asText(info, tokens);
    else note.value = "The text was changed while the model wrote; press the button again to continue it.";
  } finally {
    writingOn = false;
  }
}

async function copy(): Promise<void> {
  copied.value = "";
  const { info, writing } = await readDraft();
  stateText.value = packWriting(info, writing);
  continued.value = 0;
  try {
    await navigator.clipboard.writeText(stateText.value);
    copied.value = "The state is in the clipboard, and in the field State.";
  } catch {
    copied.value = "The state is in the field State.";
  }
}

const carryOn = newest(
  async (text: string, count: number) => {
    if (!text.trim() || !count) return ["", ""];
    const info = await engine.load(model.value);
    try {
      const writing = unpackWriting(info, text);
      return [asText(info, (await engine.write(info.name, writing, count, options())).tokens), ""];
    } catch (error) {
      return ["", (error as Error).message];
    }
  },
  ([text, sentence]) => ([continuation.value, problem.value] = [text, sentence]),
);

/** Show the continuation whenever the state or the number of its characters changes. */
export function startContinuing(): void {
  effect(() => {
    model.value, options();
    void carryOn(stateText.value, continued.value);
  });
}

const title = computed(() =>
  stateText.value ? `State (${stateText.value.length.toLocaleString("en")} characters)` : "State",
);

export function State() {
  return (
    <Panel name="state" title="Copy the state">
      <p>
        Everything the model knows about a text is in its state. Copy the state and delete the text. Then continue from the
        state, here or on another computer: the model goes on as if it still had the text. Seed, Temperature and Top-k
        are those of the first panel; a copied state keeps its seed.
      </p>
      <div class="pair">
        <div class="column">
          <TextField label="Text" rows={4} limit={TEXT_LIMIT} value={draft} onChange={() => (copied.value = "")} />
          <div class="buttons">
            <button
              type="button"
              disabled={draft.value.length + MORE > TEXT_LIMIT}
              onClick={() => void writeOn().catch(report)}
            >
              Write {MORE} characters
            </button>
            <button type="button" onClick={() => void copy().catch(report)}>Copy the state</button>
          </div>
          <div role="status">
            {note.value && <p class="note">{note}</p>}
            {copied.value && <p class="small">{copied}</p>}
          </div>
        </div>
        <div class="column">
          <TextField label={title.value} rows={4} limit={STATE_LIMIT} value={stateText} onChange={() => (continued.value = 0)} />
          <div class="buttons">
            <button
              type="button"
              disabled={!stateText.value.trim() || continued.value >= WRITTEN_LIMIT}
              onClick={() => (continued.value += MORE)}
            >
              Continue from the state
            </button>
          </div>
          <p class="note" role="status">{problem}</p>
        </div>
      </div>
      {continuation.value && (
        <>
          <h3>What follows from the state</h3>
          <pre class="written" tabIndex={0} role="group" aria-label="Text that follows from the state">
            {continuation}
          </pre>
        </>
      )}
    </Panel>
  );
}
