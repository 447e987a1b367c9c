// Search without a server. The theme searches in a worker, which browsers refuse to a page that is a file:
// there, a hidden frame runs the worker's script. The theme would load another such script from the web.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.frame = new Promise((loaded) => frame.addEventListener("load", () => loaded(frame.contentWindow)));
      frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      frame.srcdoc =
        "<script>window.postMessage = (data) => frameElement.answer(data)</script>" +
        `<script src="${new URL(url, location)}"></script>`;
      document.body.append(frame);
    }

    postMessage(data) {
      this.frame.then((target) => target.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
