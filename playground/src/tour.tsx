/** A guided tour: five questions, each to be answered before the slider is moved. */

import { batch, computed, effect, signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { goTo, SITE } from "./address";
import { mean, surprises } from "./analysis";
import { secret } from "./code";
import { loaded } from "./models";
import { running, setEvery, stopAfter, writeAnew, writeOn } from "./panels/writers";
import { every, schedule, tour, written, WRITTEN_LIMIT, type Reset } from "./view";

interface Question {
  ask: string;
  options: string[];
  right: number;
  /** What to do to see the answer, and what does it for the reader. */
  task: string;
  show(): void;
  /** Of so many characters as are enough, how many can be seen; null: the slider is elsewhere. */
  seen(): number | null;
  /** Why it is so. */
  why(): string;
  /** Whether it is so of the reader's text, too. */
  holds?(): boolean;
  /** What the page shows when the question is asked, and when it is answered. */
  before(): void;
  look?(): void;
  /** Whether it is about the text that is there, which is read from the top. */
  given?: boolean;
}

/** Characters after which a text shows what it is like. */
const ENOUGH = 100;

/** Characters that are written after the answer: what it speaks of stays in sight. */
const A_LITTLE = 20;

/** Characters of babble before the right one keeps its state. */
const BABBLE = 150;

/** Whether the right one babbled for so long, and has room to show what it writes then. */
function babbled(): boolean {
  const [[, first], moved] = schedule.value;
  const until = Math.min(moved?.[0] ?? Infinity, written.value); // a move may be to come
  return first === 1 && until >= BABBLE && until <= WRITTEN_LIMIT - ENOUGH;
}

/** Lines above the mark that show what the text was like before. */
const LINES_BEFORE = 2;

/** Scroll the right one's text back, if need be, to just above the line in which the slider was moved. */
function showMark(): void {
  const mark = document.querySelector("#writers mark:last-of-type");
  const field = mark?.parentElement;
  if (!mark || !field) return;
  const height = parseFloat(getComputedStyle(field).lineHeight);
  const top = mark.getBoundingClientRect().top - field.getBoundingClientRect().top - field.clientTop + field.scrollTop;
  field.scrollTop = Math.min(field.scrollTop, height * Math.max(0, Math.floor(top / height) - LINES_BEFORE));
}

/** Scroll both texts. */
function scrollTexts(to: "top" | "bottom"): void {
  for (const field of document.querySelectorAll("#writers .written")) field.scrollTop = to === "top" ? 0 : field.scrollHeight;
}

/** How much is written if all of it was written with the slider there. */
const writtenWith = (reset: Reset) => (schedule.value.length === 1 && every.value === reset ? written.value : null);

/** Write with the slider there, or go on with it. */
const writeWith = (reset: Reset) => (writtenWith(reset) === null ? writeAnew([[0, reset]]) : writeOn());

/** Nats per character with a reset before every character, every 32, and never, as they are shown; null: not yet known. */
function costs(): number[] | null {
  const found = ([1, 32, null] as Reset[]).map((reset) => surprises.value.get(reset));
  return found.every((nats) => nats !== undefined) ? found.map((nats) => +mean(nats).toFixed(2)) : null;
}

/** Percent of the state's gain that are left when it is reset every 32 characters; NaN: there is no gain. */
function kept(): number {
  const [one, some, all] = costs() ?? [];
  return one > all ? Math.round((100 * (one - some)) / (one - all)) : NaN;
}

/** Whether that is as the question's answer says. */
const mostIsKept = () => kept() > 90;

/** The same in words. */
function gain(): string {
  const known = costs();
  if (!known) return "";
  const [one, some, all] = known.map((nats) => nats.toFixed(2));
  if (Number.isNaN(kept())) {
    return (
      "On this text, the state does not help this model, which learned from Shakespeare: a character costs " +
      `${all} nats if it is never reset, and ${one} with a reset before every character.`
    );
  }
  const saved = `Never reset, the model saves ${(known[0] - known[2]).toFixed(2)} nats per character (${one} to ${all});`;
  if (kept() <= 0) return `On this text, nothing is left. ${saved} with a reset every 32, it costs ${some}.`;
  const both = `${saved} with a reset every 32, ${(known[0] - known[1]).toFixed(2)}, which is`;
  if (!mostIsKept()) return `On this text, it is less. ${both} ${kept()}%.`;
  return `${both} ${kept() > 100 ? "all of it" : `${kept()}%`}. The next character depends mostly on what is close by.`;
}

const QUESTIONS: Question[] = [
  {
    ask: "Both writers use the same model, the same prompt and the same random numbers. What does the right one write if its state is never reset?",
    options: ["The same text as the left one", "Another text, just as good", "A worse text"],
    right: 0,
    task: "Move the slider to “never” and press “Start again”.",
    before: () => goTo("writers", "instant"),
    show: () => writeWith(null),
    seen: () => writtenWith(null),
    why: () => "The texts agree letter by letter. So whatever differs when you move the slider comes from the state alone.",
  },
  {
    ask: "Now the state is reset every 8 characters. What does the right one write?",
    options: ["Letters in random order, as if rolled with dice", "Bits of words, and words that do not go together", "A text as good as the left one"],
    right: 1,
    task: "Move the slider to 8 and press “Start again”.",
    before: () => goTo("writers", "instant"),
    show: () => writeWith(8),
    seen: () => writtenWith(8),
    why: () =>
      "Each thin line is a reset. The letter right after it was still drawn with the old state, and is then all that " +
      "the model knows, so words break one letter later. It never knows more than eight: too few to choose words that go together.",
  },
  {
    ask: "The right one has babbled for 150 characters. From now on, it keeps its state. When does it write English again?",
    options: ["Within a word or two", "After another 150 characters", "Never: its text is ruined"],
    right: 0,
    task: "Move the slider to “never” and press “Write”.",
    given: true,
    before: () => {
      goTo("writers", "instant");
      writeAnew([[0, 1]], BABBLE);
    },
    show: () => {
      if (!babbled()) return writeAnew([[0, 1], [BABBLE, null]], BABBLE + ENOUGH);
      setEvery(null);
      writeOn();
    },
    seen: () => {
      const [from, reset] = schedule.value.at(-1)!;
      return babbled() && reset === null ? written.value - from : null;
    },
    why: () =>
      "Look after the mark: the state fills again with what the model reads, so a rare reset does little harm. " +
      "With the same random numbers, the right one often ends up in the lines of the left.",
  },
  {
    ask: "The state makes guesses better. If it is reset only every 32 characters, how much of that improvement is left?",
    options: ["About a third", "About half", "More than nine tenths"],
    right: 2,
    task: "Move the slider to 32 and look at the memory curve.",
    before: () => {
      setEvery(1);
      goTo("surprise", "instant");
    },
    show: () => {
      goTo(loaded.value ? "surprise" : "writers"); // which load the model, or say why they cannot
      if (!loaded.value) writeOn();
      setEvery(32);
    },
    look: () => document.getElementById("curve")!.scrollIntoView(),
    seen: () => (every.value === 32 && costs() ? ENOUGH : null),
    why: gain,
    holds: () => costs() === null || mostIsKept(),
  },
  {
    ask: "Your own network writes like the right side: each letter fits the one before it, but nothing fits beyond that. Its training went well. What is wrong?",
    options: ["The temperature is too high", "Each step gets a new state", "The letters are numbered differently than in training"],
    right: 1,
    task: "Look at two loops: the first writes like the left side, the second like the right.",
    given: true,
    before: () => {
      goTo("writers", "instant");
      writeAnew([[0, 1]], BABBLE);
    },
    show: () => setEvery(1),
    look: () => document.getElementById("code")!.scrollIntoView(),
    seen: () => (every.value === 1 && held.value ? ENOUGH : null),
    why: () =>
      "With either of the other two, even pairs of letters would look wrong. Print the state above each call: after " +
      "the first, it must be neither None nor zeros.",
  },
];

/** The option that the reader chose; null: none yet. It holds from when the answer begins to show. */
const guess = signal<number | null>(null);
const held = signal(false);
const seen = signal(false);

/** How much of the answer can be seen; null: nothing. */
const shown = computed(() => QUESTIONS[tour.value - 1]?.seen() ?? null);

// Whoever moves the slider needs no button
let showed = shown.peek();
effect(() => {
  if (shown.value !== null && showed === null && guess.peek() !== null) held.value = true;
  showed = shown.value;
});

const enough = computed(() => held.value && (shown.value ?? 0) >= ENOUGH);
effect(() => {
  if (!enough.value) return;
  seen.value = true;
  stopAfter(A_LITTLE);
});

// The last question asks for the bug: from the first one on, nothing shows it until that is answered
effect(() => {
  secret.value = tour.value > 0 && !(tour.value === QUESTIONS.length && held.value);
});

/** Of the questions that were left: the option that was chosen, and whether the answer was shown. */
const left = new Map<number, [guess: number | null, seen: boolean]>();
/** Whether the answer is shown again. */
let again = false;

/** Ask a question, counted from 1, or show again how it was answered; 0 ends the tour. */
export function ask(number: number): void {
  left.set(tour.peek(), [guess.peek(), seen.peek()]);
  if (!number) left.clear();
  const [option, answered] = left.get(number) ?? [null, false];
  again = answered;
  batch(() => ([guess.value, held.value, seen.value, tour.value] = [option, answered, answered, number]));
  QUESTIONS[number - 1]?.before();
  if (answered) QUESTIONS[number - 1].show();
}

/** End the tour; the focus returns to where it began. */
function close(): void {
  ask(0);
  document.getElementById("take-the-tour")?.focus({ preventScroll: true });
}

/** Until the answer can be seen: what shows it, or how much of it is written. */
function ShowMe({ show }: { show(): void }) {
  const writing = held.value && shown.value !== null && running.value;
  return (
    <button type="button" aria-disabled={writing} onClick={() => writing || ((held.value = true), show())}>
      {writing ? `Writing … ${Math.max(0, shown.value!)} of ${ENOUGH}` : "Show me"}
    </button>
  );
}

export function Tour() {
  const card = useRef<HTMLElement>(null);
  const title = useRef<HTMLHeadingElement>(null);
  const head = useRef<HTMLDivElement>(null);
  const answer = useRef<HTMLParagraphElement>(null);
  const number = tour.value;
  useEffect(() => title.current?.focus({ preventScroll: true }), [number]);
  useEffect(() => {
    if (seen.value) QUESTIONS[number - 1]?.look?.(); // now: what is above it has its new height
  }, [seen.value, number]);
  // The button that was pressed is gone. A reader who moves the slider keeps the focus there.
  useEffect(() => {
    if (!answer.current || again) return;
    const { activeElement } = document;
    if (activeElement === document.body || card.current!.contains(activeElement)) answer.current.focus({ preventScroll: true });
    // Only the card scrolls, and its title stays
    card.current!.scrollTop += answer.current.getBoundingClientRect().top - head.current!.getBoundingClientRect().bottom;
  }, [seen.value]);
  useEffect(() => {
    const given = QUESTIONS[number - 1]?.given;
    if (running.value) given && scrollTexts("bottom"); // from where the fields follow the text
    else if (seen.value) showMark();
    else if (given) scrollTexts("top");
  }, [number, seen.value, running.value]);
  useEffect(() => {
    if (!number) return;
    const pressed = (event: KeyboardEvent) => event.key === "Escape" && close();
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [number]);
  if (!number) return null;
  const { ask: question, options, right, task, show, why, holds } = QUESTIONS[number - 1];
  const marked = seen.value && (holds?.() ?? true);
  return (
    <aside ref={card} class="tour" aria-label="Guided tour">
      <div ref={head} class="head">
        <h2 ref={title} tabIndex={-1}>Question {number} of {QUESTIONS.length}</h2>
      </div>
      <p>{question}</p>
      <fieldset class="choices" aria-label="Your prediction" disabled={held.value}>
        {options.map((option, i) => (
          <label key={option} class={i === (marked ? right : guess.value) ? "chosen" : ""}>
            <input type="radio" name="prediction" checked={guess.value === i} onChange={() => (guess.value = i)} />
            {marked && (i === right || i === guess.value) && <b aria-hidden="true">{i === right ? "✓" : "✗"}</b>}
            <span>{option}</span>
          </label>
        ))}
      </fieldset>
      <div role="status">
        {guess.value === null && <p class="small">Predict first.</p>}
        {guess.value !== null && !seen.value && <p>{task}</p>}
        {seen.value && (
          <p ref={answer} tabIndex={-1}>
            <b>
              {!marked ? `In Shakespeare, it is “${options[right]}”.`
                : guess.value === right ? "You were right." : `It is “${options[right]}”.`}
            </b>{" "}
            {why()}
          </p>
        )}
        {seen.value && number === QUESTIONS.length && (
          <p>
            Go on: <button type="button" onClick={() => document.getElementById("class-title")!.scrollIntoView()}>Links for a class</button>
            {SITE && <span> or <a href={`${SITE}tutorials/gru_by_hand/`}>a GRU by hand</a></span>}
          </p>
        )}
      </div>
      <div class="foot buttons">
        {guess.value !== null && !seen.value && <ShowMe show={show} />}
        {number > 1 && <button type="button" onClick={() => ask(number - 1)}>Back</button>}
        {number < QUESTIONS.length && <button type="button" onClick={() => ask(number + 1)}>Next</button>}
        <button type="button" onClick={close}>Close</button>
      </div>
    </aside>
  );
}
