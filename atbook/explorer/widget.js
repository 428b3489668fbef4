/* The explorer in a notebook, for anywidget: the models and the address are the widget's. */
export default {
  render({ model, el }) {
    let written = null; // a change of the address that is not this widget's own is somebody's in Python
    Explorer.open(el, model.get("content"), {
      read: () => model.get("address"),
      write: address => {
        written = address;
        model.set("address", address);
        model.save_changes();
      },
      moved: call => model.on("change:address", () => model.get("address") !== written && call()),
    });
  },
};
