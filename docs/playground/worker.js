// The compiler and the simulator, off the page's own thread. Text in, text out: a question is a JSON
// list of words, an answer is what launcher/playground.py says to it.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const ROOT = "/foldpipe";

async function start() {
  const python = await loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href });
  const archive = await fetch(new URL("foldpipe.zip", import.meta.url));
  if (!archive.ok) throw new Error(`foldpipe.zip: ${archive.status}`);
  python.unpackArchive(await archive.arrayBuffer(), "zip", { extractDir: ROOT });
  python.runPython(`
import os, sys
sys.path.insert(0, "${ROOT}")
os.chdir("/home/pyodide")
from launcher.playground import answer_json, read_options
with open("${ROOT}/options.json") as file:
    options = read_options(file.read())
`);
  const ask = python.globals.get("answer_json"), options = python.globals.get("options");
  return (question) => {
    for (const [name, text] of Object.entries(question.files))
      python.FS.writeFile(`/home/pyodide/${name}`, text);
    return ask(JSON.stringify(question.words), options);
  };
}

const ready = start();
ready.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ broken: String(error) }),
);

onmessage = async ({ data }) => {
  let text;
  try {
    text = (await ready)(data);
  } catch (error) {
    // Not a wrong question, which is an answer as well: memory, or a mistake of ours.
    const last = String(error.message || error).trim().split("\n").pop();
    text = JSON.stringify({ error: `This page could not work it out: ${last}`, broken: true });
  }
  postMessage({ id: data.id, text });
};
