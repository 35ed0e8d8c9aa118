/** What several panels are made of. */

import type { ComponentChildren } from "preact";
import { computed } from "@preact/signals";
import { analysed, notes } from "../analysis";
import type { Panel as Name } from "../view";

export function Panel({ name, title, children }: { name: Name; title: string; children: ComponentChildren }) {
  return (
    <section id={name} class="panel" aria-labelledby={`${name}-title`}>
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

/** What the colours of `Letters` mean. */
export function Legend({ kind, low, high }: { kind: string; low: string; high: string }) {
  return (
    <p class={`legend ${kind}`}>
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
