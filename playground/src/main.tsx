/** Read the link, show the page, write the first text, and then do the rest. */

import { effect, type ReadonlySignal } from "@preact/signals";
import { render } from "preact";
import { startAnalysis } from "./analysis";
import { App, unused, whole } from "./app";
import { loadAll, loaded, report } from "./models";
import { startContinuing } from "./panels/state";
import { startWriters } from "./panels/writers";
import { watchScreen } from "./screen";
import { readView, writeView } from "./view";
import "./style.css";

/** Milliseconds between two changes of the URL; browsers refuse more than 100 in 30 seconds. */
const URL_PAUSE = 500;

function keepUrl(): void {
  let timer = 0;
  effect(() => {
    writeView();
    timer ||= window.setTimeout(() => {
      timer = 0;
      const view = writeView();
      history.replaceState(null, "", view ? `#${view}` : location.pathname + location.search);
    }, URL_PAUSE);
  });
  addEventListener("hashchange", () => location.reload()); // another link was opened in this tab
}

const task = () => new Promise((done) => setTimeout(done));

/** Wait until a signal has a value. */
const has = (found: ReadonlySignal<unknown>) => new Promise<void>((done) => effect(() => void (found.value && done())));

async function start(): Promise<void> {
  history.scrollRestoration = "manual"; // the link says where to look
  unused.value = readView(location.hash.slice(1));
  await task(); // the browser may do something else
  render(<App />, document.getElementById("app")!);
  startWriters();
  await task();
  whole.value = true;
  await task();
  watchScreen();
  keepUrl();
  await has(loaded); // after a failure, the reader tries again
  startAnalysis();
  startContinuing();
  await loadAll();
}

start().catch(report);
