/** Read the link, show the page, write the first text, and then do the rest. */

import { effect, type ReadonlySignal } from "@preact/signals";
import { render } from "preact";
import { startAddress } from "./address";
import { startAnalysis } from "./analysis";
import { App, unused, whole } from "./app";
import { loadAll, loaded, report } from "./models";
import { startContinuing } from "./panels/state";
import { startWriters } from "./panels/writers";
import { watchScreen } from "./screen";
import { ask } from "./tour";
import { readView, tour, written } from "./view";
import "./style.css";

const task = () => new Promise((done) => setTimeout(done));

/** Wait until a signal has a value. */
const has = (found: ReadonlySignal<unknown>) => new Promise<void>((done) => effect(() => void (found.value && done())));

async function start(): Promise<void> {
  history.scrollRestoration = "manual"; // the link says where to look
  unused.value = readView(location.hash.slice(1));
  const asked = written.value ? 0 : tour.value; // a link to a question; with a text, it is a link to what was seen of it
  await task(); // the browser may do something else
  render(<App />, document.getElementById("app")!);
  startWriters();
  await task();
  whole.value = true;
  await task();
  watchScreen();
  startAddress();
  if (asked) ask(asked);
  await has(loaded); // after a failure, the reader tries again
  startAnalysis();
  startContinuing();
  await loadAll();
}

start().catch(report);
