import astra_alpha from "../../../jaxgru/lm/pretrained/astra_alpha.safetensors?url";
import astra_beta from "../../../jaxgru/lm/pretrained/astra_beta.safetensors?url";
import elman_alpha from "../../../jaxgru/lm/pretrained/elman_alpha.safetensors?url";
import type { ModelName } from "./types";

const URLS: Record<ModelName, string> = { astra_alpha, astra_beta, elman_alpha };

/** Fetch a model's file: it ships with the Python package, and the build copies it beside the page. */
export async function fetchModel(name: ModelName): Promise<ArrayBuffer> {
  const failed = (why: string) => new Error(`The model ${name} could not be loaded: ${why}.`);
  let response: Response;
  try {
    response = await fetch(URLS[name]);
  } catch {
    throw failed("the server cannot be reached");
  }
  if (!response.ok) throw failed(`the server answered ${response.status}`);
  return response.arrayBuffer();
}
