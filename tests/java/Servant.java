import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Does with kafka-clients what it is told on standard input: a command a line, its fields separated by tabs, bytes
 * in base64, "-" for null. Answers with lines that begin with a space, and then "ok" or "error" with the reason.
 */
public final class Servant {
    private static final long TIMEOUT_S = 60;
    private static final String NULL = "-";

    private final Map<String, Object> common = new HashMap<>();
    private final Map<String, KafkaProducer<byte[], byte[]>> producers = new HashMap<>();
    private final BufferedReader in;
    private final PrintStream out;
    private final Admin admin;

    private Servant(String bootstrap) {
        common.put("bootstrap.servers", bootstrap);
        in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        admin = Admin.create(new HashMap<>(common));
    }

    public static void main(String[] arguments) throws Exception {
        new Servant(arguments[0]).run();
    }

    private void run() throws Exception {
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            try {
                obey(line.split("\t", -1));
                out.println("ok");
            } catch (Exception e) {
                out.println("error " + String.valueOf(e).replace('\n', ' '));
            }
            out.flush();
        }
    }

    private void obey(String[] c) throws Exception {
        switch (c[0]) {
            case "create" -> create(c);
            case "delete" -> admin.deleteTopics(List.of(c[1])).all().get(TIMEOUT_S, TimeUnit.SECONDS);
            case "topics" -> admin.listTopics().names().get(TIMEOUT_S, TimeUnit.SECONDS).forEach(this::say);
            case "produce" -> produce(c[1], c[2], Integer.parseInt(c[3]));
            case "consume" -> consume(partition(c), Long.parseLong(c[3]), Integer.parseInt(c[4]));
            case "watermarks" -> watermarks(partition(c));
            case "offset-for-time" -> offsetForTime(partition(c), Long.parseLong(c[3]));
            case "delete-records" ->
                admin.deleteRecords(Map.of(partition(c), RecordsToDelete.beforeOffset(Long.parseLong(c[3]))))
                    .all().get(TIMEOUT_S, TimeUnit.SECONDS);
            case "configs" -> configs(new ConfigResource(ConfigResource.Type.TOPIC, c[1]));
            case "alter-config" -> alterConfig(new ConfigResource(ConfigResource.Type.TOPIC, c[1]), c[2], c[3]);
            default -> throw new IllegalArgumentException("no command " + c[0]);
        }
    }

    private void say(String line) {
        out.println(" " + line);
    }

    private static TopicPartition partition(String[] c) {
        return new TopicPartition(c[1], Integer.parseInt(c[2]));
    }

    private void create(String[] c) throws Exception {
        Map<String, String> configs = new HashMap<>();
        for (int i = 3; i < c.length; i++) {
            String[] pair = c[i].split("=", 2);
            configs.put(pair[0], pair[1]);
        }
        NewTopic topic = new NewTopic(c[1], Optional.of(Integer.parseInt(c[2])), Optional.empty());
        admin.createTopics(List.of(topic.configs(configs))).all().get(TIMEOUT_S, TimeUnit.SECONDS);
    }

    /** One producer a codec, kept: so that it lives through whatever happens to the broker between two commands. */
    private KafkaProducer<byte[], byte[]> producer(String codec) {
        return producers.computeIfAbsent(codec, name -> {
            Map<String, Object> settings = new HashMap<>(common);
            settings.put("enable.idempotence", true);
            settings.put("acks", "all");
            settings.put("compression.type", name);
            settings.put("max.request.size", 8 * 1024 * 1024);
            settings.put("linger.ms", 5);
            return new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
        });
    }

    private void produce(String topic, String codec, int count) throws Exception {
        List<String> lines = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            lines.add(in.readLine());
        }
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (String line : lines) {
            String[] fields = line.split("\t", -1);
            List<Header> headers = new ArrayList<>();
            for (int i = 4; i < fields.length; i++) {
                String[] pair = fields[i].split("=", 2);
                headers.add(new RecordHeader(pair[0], decoded(pair[1])));
            }
            sent.add(producer(codec).send(new ProducerRecord<>(topic, Integer.valueOf(fields[0]),
                Long.valueOf(fields[3]), decoded(fields[1]), decoded(fields[2]), headers)));
        }
        producer(codec).flush();
        for (Future<RecordMetadata> future : sent) {
            say(String.valueOf(future.get(TIMEOUT_S, TimeUnit.SECONDS).offset()));
        }
    }

    private KafkaConsumer<byte[], byte[]> consumer(TopicPartition partition) {
        Map<String, Object> settings = new HashMap<>(common);
        settings.put("enable.auto.commit", false);
        settings.put("fetch.max.wait.ms", 10);
        KafkaConsumer<byte[], byte[]> consumer =
            new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        consumer.assign(List.of(partition));
        return consumer;
    }

    private void consume(TopicPartition partition, long start, int count) {
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(partition)) {
            consumer.seek(partition, start);
            int seen = 0;
            while (seen < count) {
                List<ConsumerRecord<byte[], byte[]>> polled =
                    consumer.poll(Duration.ofSeconds(TIMEOUT_S)).records(partition);
                if (polled.isEmpty()) {
                    throw new IllegalStateException("only " + seen + " of " + count + " records came");
                }
                for (ConsumerRecord<byte[], byte[]> record : polled.subList(0, Math.min(polled.size(), count - seen))) {
                    say(described(record));
                    seen++;
                }
            }
        }
    }

    private static String described(ConsumerRecord<byte[], byte[]> record) {
        List<String> fields = new ArrayList<>(List.of(
            String.valueOf(record.partition()),
            String.valueOf(record.offset()),
            String.valueOf(record.timestamp()),
            String.valueOf(record.timestampType() == TimestampType.LOG_APPEND_TIME),
            encoded(record.key()),
            encoded(record.value())));
        for (Header header : record.headers()) {
            fields.add(header.key() + "=" + encoded(header.value()));
        }
        return String.join("\t", fields);
    }

    private void watermarks(TopicPartition partition) {
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(partition)) {
            say(String.valueOf(consumer.beginningOffsets(List.of(partition)).get(partition)));
            say(String.valueOf(consumer.endOffsets(List.of(partition)).get(partition)));
        }
    }

    private void offsetForTime(TopicPartition partition, long timestampMs) {
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(partition)) {
            OffsetAndTimestamp found = consumer.offsetsForTimes(Map.of(partition, timestampMs)).get(partition);
            say(found == null ? NULL : String.valueOf(found.offset()));
        }
    }

    private void configs(ConfigResource resource) throws Exception {
        admin.describeConfigs(List.of(resource)).all().get(TIMEOUT_S, TimeUnit.SECONDS).get(resource).entries()
            .forEach(entry -> say(entry.name() + "=" + entry.value()));
    }

    private void alterConfig(ConfigResource resource, String name, String value) throws Exception {
        AlterConfigOp set = new AlterConfigOp(new ConfigEntry(name, value), AlterConfigOp.OpType.SET);
        admin.incrementalAlterConfigs(Map.of(resource, List.of(set))).all().get(TIMEOUT_S, TimeUnit.SECONDS);
    }

    private static String encoded(byte[] bytes) {
        return bytes == null ? NULL : Base64.getEncoder().encodeToString(bytes);
    }

    private static byte[] decoded(String text) {
        return NULL.equals(text) ? null : Base64.getDecoder().decode(text);
    }
}
