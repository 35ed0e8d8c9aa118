/** Read the link, show the page, write the first text, and then do the rest. */

import { effect } from "@preact/signals";
import { render } from "preact";
import { startAnalysis } from "./analysis";
import { App, unused, whole } from "./app";
import { loadAll, report } from "./models";
import { startContinuing } from "./panels/state";
import { startWriters } from "./panels/writers";
import { watchScreen } from "./screen";
import { panel, readView, writeView } from "./view";
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

async function start(): Promise<void> {
  unused.value = readView(location.hash.slice(1));
  await task(); // the browser may do something else
  render(<App />, document.getElementById("app")!);
  const written = startWriters();
  await task();
  whole.value = true;
  await task();
  if (panel.value !== "writers") document.getElementById(panel.value)!.scrollIntoView({ behavior: "instant" });
  watchScreen();
  keepUrl();
  await written;
  startAnalysis();
  startContinuing();
  await loadAll();
}

start().catch(report);
