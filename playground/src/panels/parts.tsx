/** What several panels are made of. */

import type { ComponentChildren } from "preact";
import { computed, type Signal } from "@preact/signals";
import { useState } from "preact/hooks";
import { analysed, notes } from "../analysis";
import { resetInWords, type Panel as Name, type Reset } from "../view";

/** A section of the page. `busy`: its figures are not yet those of what it shows. */
export function Panel(props: { name: Name; title: string; busy?: boolean; children: ComponentChildren }) {
  const { name, title, busy = false, children } = props;
  return (
    <section id={name} class="panel" aria-labelledby={`${name}-title`} aria-busy={busy}>
      <h2 id={`${name}-title`}>{title}</h2>
      {children}
    </section>
  );
}

/** One of two columns. */
export function Column({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <div class="column">
      <h3>{title}</h3>
      {children}
    </div>
  );
}

export function Field({ label, wide, children }: { label: string; wide?: boolean; children: ComponentChildren }) {
  return (
    <label class={wide ? "field wide" : "field"}>
      <span>{label}</span>
      {children}
    </label>
  );
}

/** A field for an integer from 0 on. What cannot be used stays in it while one types, with a sentence. */
export function NumberField({ label, most, value, onValue }: {
  label: string; most: number; value: number; onValue: (value: number) => void;
}) {
  const [typed, setTyped] = useState<string | null>(null); // what cannot be used
  return (
    <>
      <Field label={label}>
        <input
          type="number"
          min={0}
          max={most}
          step={1}
          value={typed ?? value}
          aria-invalid={typed !== null}
          onInput={(event) => {
            const field = event.currentTarget;
            const given = field.valueAsNumber;
            const usable = Number.isInteger(given) && given >= 0 && given <= most;
            setTyped(usable ? null : field.value);
            if (usable) onValue(given);
          }}
          onBlur={(event) => {
            event.currentTarget.value = String(value); // also where "" stands for what is no number
            setTyped(null);
          }}
        />
      </Field>
      <p class="note" role="status">
        {typed !== null && `The field takes an integer from 0 to ${most}; ${value} is used.`}
      </p>
    </>
  );
}

/** Characters from which on a paste is made by hand: browsers take a second for 10,000. */
const LONG = 500;

/** A field for a text of so many characters; it keeps the beginning of a longer one, and says so. */
export function TextField(props: { label: string; rows: number; limit: number; value: Signal<string>; onChange?: () => void }) {
  const { label, rows, limit, value, onChange } = props;
  const [cut, setCut] = useState<[pasted: number, kept: number] | null>(null);
  const count = (length: number) => length.toLocaleString("en");
  return (
    <>
      <Field label={label} wide>
        <textarea
          rows={rows}
          value={value.value}
          maxLength={limit}
          spellcheck={false}
          onPaste={(event) => {
            const given = event.clipboardData?.getData("text/plain") ?? "";
            const field = event.currentTarget;
            const { selectionStart, selectionEnd } = field;
            const room = limit - field.value.length + (selectionEnd - selectionStart);
            setCut(given.length > room ? [given.length, room] : null);
            if (given.length < LONG) return;
            event.preventDefault();
            field.setRangeText(given.slice(0, room), selectionStart, selectionEnd, "end");
            field.dispatchEvent(new Event("input"));
          }}
          onInput={(event) => {
            value.value = event.currentTarget.value;
            onChange?.();
          }}
        />
      </Field>
      <p class="note" role="status">
        {!cut && value.value.length >= limit && `The field is full: it takes ${count(limit)} characters.`}
        {cut &&
          `The field takes ${count(limit)} characters: of the ${count(cut[0])} that were pasted, ` +
            `it keeps the first ${count(cut[1])}.`}
      </p>
    </>
  );
}

/** The words with a capital letter, to begin a sentence. */
export const capital = (words: string) => words[0].toUpperCase() + words.slice(1);

/** The title of a column whose model's state is reset. */
export const resetTitle = (every: Reset) => capital(resetInWords(every));

/** A number with its sign, to two decimals. */
export const signed = (value: number) => value.toFixed(2).replace("-", "−");

/** What the colours of `Letters` mean. */
export function Legend({ panel, low, high }: { panel: Name | "surprise difference"; low: string; high: string }) {
  return (
    <p class={`legend ${panel}`}>
      {low} <span class="scale" aria-hidden="true" /> {high}
    </p>
  );
}

/** Whether there is a text to show. */
export const ready = computed(() => analysed.value !== null && analysed.value.tokens.length > 1);

/** What was left out of the text. */
export function Notes() {
  return <div role="status">{notes.value.map((note) => <p class="note">{note}</p>)}</div>;
}
