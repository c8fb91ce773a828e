#include "lockstep/monitor/finding.h"

#include <fmt/format.h>

#include <utility>

#include "lockstep/core/text.h"

namespace lockstep::monitor {

std::string finding_text(const Finding& finding) {
  std::string about = finding.rank >= 0 ? fmt::format("rank {}", finding.rank) : "";
  if (!finding.cause.empty()) about += (about.empty() ? "" : ", ") + finding.cause;
  return printable(fmt::format(
      "{}{}: {} Evidence: {} Change: {} Expected gain: {}.", finding.rule,
      about.empty() ? "" : " (" + about + ")", finding.what, finding.evidence, finding.remedy,
      finding.gain > 0 ? fmt::format("about {:.0f} %", 100 * finding.gain) : "not known"));
}

Node findings_node(const std::vector<Finding>& findings) {
  std::vector<Node> items;
  for (const Finding& finding : findings)
    items.push_back(map_node({{"rule", text_node(finding.rule)},
                              {"rank", integer_node(finding.rank)},
                              {"cause", text_node(finding.cause)},
                              {"what", text_node(finding.what)},
                              {"evidence", text_node(finding.evidence)},
                              {"remedy", text_node(finding.remedy)},
                              {"gain", real_node(finding.gain)}}));
  return list_node(std::move(items));
}

}  // namespace lockstep::monitor
